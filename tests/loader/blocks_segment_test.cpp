#include "loader/blocks_segment.h"

#include <gtest/gtest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "common/standing_ends.h"
#include "common/trouble.h"
#include "tests/loader/loader_process.h"

namespace poise {
namespace {

// Pages of shared memory in this process's page tables.
Bytes mapped_pages() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssShmem:") {
      std::int64_t kib = 0;
      status >> kib;
      return kKiB * kib;
    }
  }
  ADD_FAILURE() << "the kernel does not say how much shared memory is mapped";
  return {};
}

std::int64_t reserved(const std::string& name) {
  struct stat status {};
  return stat(("/dev/shm/" + name).c_str(), &status) == 0 ? status.st_blocks * 512 : -1;
}

TEST(BlocksSegment, EveryPageIsThereAndZeroButNotInTheLoadersPageTables) {
  const Bytes before = mapped_pages();
  const std::atomic<bool> stop{false};
  const std::string name = segment_name(testing_support::fresh_run_id(), "blocks-1");
  BlocksSegment segment(name, kMiB * 96);
  segment.grow((kMiB * 96).n, 1, 0, [](std::uint64_t) {}, stop);
  EXPECT_LT((mapped_pages() - before).n, kMiB.n);
  struct stat status {};
  ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, (kMiB * 96).n);
  const Segment attached = Segment::attach(name, Access::read_only);
  EXPECT_TRUE(std::all_of(attached.data(), attached.data() + attached.size().n,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

// A pool of two regions of 72 MiB: 16, 32 and 36 MiB at each end of each.
TEST(BlocksSegment, ItGrowsFromBothEndsOfEachRegion) {
  constexpr std::uint64_t kRegion = 72 << 20;
  const std::string name = segment_name(testing_support::fresh_run_id(), "blocks-1");
  BlocksSegment segment(name, {2 * kRegion});
  std::atomic<bool> stop{false};
  EXPECT_EQ(reserved(name), 0);
  std::vector<std::uint64_t> steps;
  segment.grow(
      kRegion, 2, 0,
      [&](std::uint64_t standing) {
        steps.push_back(standing);
        EXPECT_GE(reserved(name), std::min<std::int64_t>(4 * standing, 2 * kRegion));
        const int file = open(("/dev/shm/" + name).c_str(), O_RDONLY);
        for (std::uint64_t layer = 0; layer < 2; ++layer) {
          const auto ends = standing_ends(kRegion, standing);
          const auto hole = lseek(file, static_cast<off_t>(layer * kRegion), SEEK_HOLE);
          EXPECT_GE(static_cast<std::uint64_t>(hole), layer * kRegion + ends.low);
          const auto data = lseek(file, static_cast<off_t>(layer * kRegion + ends.high), SEEK_HOLE);
          EXPECT_GE(static_cast<std::uint64_t>(data), (layer + 1) * kRegion);
        }
        close(file);
      },
      stop);
  EXPECT_EQ(steps, (std::vector<std::uint64_t>{16 << 20, 32 << 20, kRegion}));
  EXPECT_EQ(reserved(name), static_cast<std::int64_t>(2 * kRegion));
}

TEST(BlocksSegment, GrowingIsGivenUpWhenAskedAndGoesOnLater) {
  constexpr std::uint64_t kRegion = 72 << 20;
  const std::string name = segment_name(testing_support::fresh_run_id(), "blocks-1");
  BlocksSegment segment(name, {kRegion});
  std::atomic<bool> stop{false};
  std::uint64_t stood = 0;
  EXPECT_THROW(segment.grow(
                   kRegion, 1, 0,
                   [&](std::uint64_t standing) {
                     stood = standing;
                     stop = true;
                   },
                   stop),
               Failure);
  EXPECT_EQ(stood, 16u << 20);
  stop = false;
  segment.grow(kRegion, 1, stood, [&](std::uint64_t standing) { stood = standing; }, stop);
  EXPECT_EQ(stood, kRegion);
  EXPECT_EQ(reserved(name), static_cast<std::int64_t>(kRegion));
}

using SealedWeights = testing_support::LoaderProcess;

TEST_F(SealedWeights, AreNotInTheLoadersPageTables) {
  const Bytes before = mapped_pages();
  start();
  wait_for_seal();
  const Bytes weights{static_cast<std::int64_t>(control()->weights_bytes)};
  EXPECT_LT((mapped_pages() - before).n, weights.n / 2);  // the control segment is
}

}  // namespace
}  // namespace poise
