#include "common/mapping/huge_pages.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

namespace poise {
namespace {

// A file without a name, in the same memory as /dev/shm.
class HugePagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = memfd_create("huge", MFD_CLOEXEC);
    ASSERT_GE(file_, 0);
    ASSERT_EQ(ftruncate(file_, kSize.n), 0);
  }
  void TearDown() override { close(file_); }

  void write(std::int64_t at, std::string_view bytes) const {
    ASSERT_EQ(pwrite(file_, bytes.data(), bytes.size(), at), std::ssize(bytes));
  }
  std::string read(std::int64_t at, std::size_t bytes) const {
    std::string text(bytes, '?');
    EXPECT_EQ(pread(file_, text.data(), bytes, at), std::ssize(text));
    return text;
  }
  Bytes taken() const {
    struct stat status {};
    EXPECT_EQ(fstat(file_, &status), 0);
    return {status.st_blocks * 512};
  }

  static constexpr Bytes kSize = kMiB * 6;
  int file_ = -1;
};

TEST_F(HugePagesTest, WhatLiesInAFileStaysAndHolesAreZero) {
  write(kMiB.n + 4090, "across two pages");
  write(kSize.n - 3, "end");
  take_huge_pages(file_, 0, kSize.n);
  EXPECT_EQ(read(kMiB.n + 4090, 16), "across two pages");
  EXPECT_EQ(read(kSize.n - 3, 3), "end");
  EXPECT_EQ(read(3 * kMiB.n, 8192), std::string(8192, '\0'));
}

TEST_F(HugePagesTest, OnlyWholeHugePagesOfAPartAreTaken) {
  const bool all = take_huge_pages(file_, kMiB.n, 5 * kMiB.n);
  const Bytes once = taken();
  EXPECT_LE(once, kHugePage) << "a kernel that gives none may leave a small page";
  if (all) {
    EXPECT_EQ(once, kHugePage);
  }
  EXPECT_TRUE(take_huge_pages(file_, 4096, kMiB.n)) << "there is none to take";
  EXPECT_EQ(taken(), once);
}

TEST_F(HugePagesTest, TakingThemTwiceTakesNoMore) {
  if (take_huge_pages(file_, 0, kSize.n)) {
    take_huge_pages(file_, 0, kSize.n);
    EXPECT_EQ(taken(), kSize);
  }
}

// A field of this mapping in /proc/self/smaps.
Bytes mapped_as(const void* data, std::string_view field) {
  std::ifstream file("/proc/self/smaps");
  const std::string begin = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(data));
  std::string line;
  bool here = false;
  while (std::getline(file, line)) {
    here = line.find('-') < line.find(' ') ? line.starts_with(begin) : here;
    if (here && line.starts_with(field)) {
      return kMiB * std::stoll(line.substr(line.find(':') + 1)) / 1024;
    }
  }
  return {-1};
}

TEST_F(HugePagesTest, WhatIsGivenIsMappedAsHugePages) {
  if (!take_huge_pages(file_, 0, kSize.n)) {
    return;  // by this kernel, or not now
  }
  AlignedRange range(kSize.n);
  ASSERT_EQ(mmap(range.data(), kSize.n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, 0),
            range.data());
  for (std::int64_t at = 0; at < kSize.n; at += 4096) {
    static_cast<volatile char*>(range.data())[at] = 1;
  }
  EXPECT_EQ(mapped_as(range.data(), "ShmemPmdMapped:"), kSize);
}

// Who refuses is not asked at once again: every part of a pool would wait for it.
TEST_F(HugePagesTest, AKernelThatRefusesIsLeftAloneForAWhile) {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    const bool refused = !take_huge_pages(file_, 0, kHugePage.n);
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
    const bool left_alone = !take_huge_pages(file_, kHugePage.n, kSize.n) && taken() < kHugePage;
    _exit(refused && left_alone ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(AlignedRange, BeginsWhereAHugePageCanBeMapped) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, std::size_t{5} << 20}) {
    const AlignedRange range(bytes);
    ASSERT_NE(range.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range.data()) % (std::uintptr_t{2} << 20), 0u);
  }
}

// An address that is free can be mapped by a call that demands a free one.
bool is_free(std::byte* at) {
  void* const place =
      mmap(at, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (place == MAP_FAILED) {
    return false;
  }
  munmap(place, 4096);
  return place == at;
}

TEST(AlignedRange, FreesWhatNothingWasMappedOver) {
  constexpr std::size_t kMapped = std::size_t{3} << 20;
  std::byte* data = nullptr;
  {
    AlignedRange range(kMapped);
    data = static_cast<std::byte*>(range.data());
    ASSERT_EQ(mmap(data, kMapped, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), data);
    range.leave();
  }
  EXPECT_FALSE(is_free(data)) << "it belongs to the caller";
  EXPECT_FALSE(is_free(data + kMapped - 4096));
  EXPECT_TRUE(is_free(data + kMapped));
  munmap(data, kMapped);
  {
    const AlignedRange range(kMapped);
    data = static_cast<std::byte*>(range.data());
  }
  EXPECT_TRUE(is_free(data));
}

}  // namespace
}  // namespace poise
