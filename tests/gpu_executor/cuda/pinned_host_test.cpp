#include "gpu_executor/cuda/pinned_host.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <vector>

#include "common/trouble.h"
#include "tests/support/cuda_test.h"

namespace poise {
namespace {

constexpr std::size_t kMiBytes = std::size_t{1} << 20;
constexpr std::size_t kSize = 1024 * kMiBytes;
constexpr std::size_t kCut = 256 * kMiBytes;

class PinnedHostTest : public test::CudaTest {
 protected:
  void SetUp() override {
    test::CudaTest::SetUp();
    if (IsSkipped()) {
      return;
    }
    void* mapped = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    memory_ = {static_cast<std::byte*>(mapped), kSize};
    for (std::size_t at = kCut; at < kSize; at += kCut) {
      cuts_.push_back(at);
    }
  }
  void TearDown() override {
    if (!memory_.empty()) {
      munmap(memory_.data(), memory_.size());
    }
  }

  static bool is_pinned(const std::byte* at) {
    cudaPointerAttributes attributes{};
    return cudaPointerGetAttributes(&attributes, at) == cudaSuccess &&
           attributes.type == cudaMemoryTypeHost;
  }

  std::span<std::byte> memory_;
  std::vector<std::uint64_t> cuts_;
};

TEST_F(PinnedHostTest, WhatIsNeededIsPinned) {
  PinnedHost pinned;
  pinned.pin({&memory_, 1}, false, cuts_);
  EXPECT_EQ(pinned.bytes().n, static_cast<std::int64_t>(kSize));
  const std::byte* last = &memory_.back();
  pinned.need(last, Bytes{1});
  EXPECT_TRUE(is_pinned(last));
  pinned.need(memory_.data(), Bytes{static_cast<std::int64_t>(kSize)});
  for (std::size_t at = 0; at < kSize; at += kCut) {
    EXPECT_TRUE(is_pinned(&memory_[at])) << at;
  }
  pinned.unpin(memory_);
  EXPECT_FALSE(is_pinned(last));
  EXPECT_EQ(pinned.bytes().n, 0);
}

TEST_F(PinnedHostTest, APartMayEndBeforeItsTurn) {
  PinnedHost pinned;
  for (int i = 0; i < 3; ++i) {
    pinned.pin({&memory_, 1}, false, cuts_);
    pinned.unpin(memory_);
    EXPECT_FALSE(is_pinned(memory_.data()));
    EXPECT_FALSE(is_pinned(&memory_.back()));
  }
  pinned.need(memory_.data(), Bytes{1});  // of no part: nothing to wait for
}

TEST_F(PinnedHostTest, WhatCannotBePinnedIsToldToWhoeverNeedsIt) {
  ASSERT_EQ(mprotect(&memory_[kCut], kCut, PROT_NONE), 0);
  PinnedHost pinned;
  pinned.pin({&memory_, 1}, false, cuts_);
  try {
    pinned.need(&memory_[kCut], Bytes{1});
    FAIL() << "it was pinned";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
    EXPECT_THAT(failure.what(), testing::HasSubstr("cannot be pinned for the GPU"));
  }
  pinned.unpin(memory_);
}

}  // namespace
}  // namespace poise
