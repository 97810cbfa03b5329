#include "gpu_executor/cuda/pinned_host.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "common/trouble.h"
#include "gpu_executor/cuda/cuda_device.h"
#include "tests/gpu_executor/shared_bytes.h"
#include "tests/support/cuda_test.h"

namespace poise {
namespace {

constexpr std::size_t kMiBytes = std::size_t{1} << 20;
constexpr std::size_t kCut = PinnedHost::kSlice;
constexpr std::size_t kSize = 6 * kCut;  // more than are pinned at a time

class PinnedHostTest : public test::CudaTest {
 protected:
  void SetUp() override {
    test::CudaTest::SetUp();
    if (!IsSkipped()) {
      memory_ = mapped_.emplace(kSize).all();
    }
  }

  static bool is_pinned(const std::byte* at) {
    cudaPointerAttributes attributes{};
    return cudaPointerGetAttributes(&attributes, at) == cudaSuccess &&
           attributes.type == cudaMemoryTypeHost;
  }

  std::optional<test::SharedBytes> mapped_;
  std::span<std::byte> memory_;  // all of it
};

TEST_F(PinnedHostTest, WhatIsNeededIsPinned) {
  PinnedHost pinned;
  pinned.pin({&memory_, 1}, false);
  EXPECT_EQ(pinned.bytes().n, static_cast<std::int64_t>(kSize));
  const std::byte* last = &memory_.back();
  pinned.need(last, Bytes{1});
  EXPECT_TRUE(is_pinned(last));
  pinned.need(memory_.data(), Bytes{static_cast<std::int64_t>(kSize)});
  for (std::size_t at = 0; at < kSize; at += kCut) {
    EXPECT_TRUE(is_pinned(&memory_[at])) << at;
  }
  pinned.unpin({&memory_, 1});
  EXPECT_FALSE(is_pinned(last));
  EXPECT_EQ(pinned.bytes().n, 0);
}

// The first is pinned, others are being, the last ones wait: for all of them at once, and no others.
TEST_F(PinnedHostTest, SlicesInEveryStateMayBeNeededTogether) {
  PinnedHost pinned;
  pinned.pin({&memory_, 1}, false);
  pinned.need(memory_.data(), Bytes{1});
  pinned.need(memory_.data(), Bytes{static_cast<std::int64_t>(kSize)});
  for (std::size_t at = 0; at < kSize; at += kCut) {
    EXPECT_TRUE(is_pinned(&memory_[at])) << at;
  }
  pinned.unpin({&memory_, 1});
}

TEST_F(PinnedHostTest, ACopyEndsWhereItsSliceDoes) {
  PinnedHost pinned;
  const auto run = [&](std::size_t at, std::int64_t size) {
    const PinnedHost::Run found = pinned.run(memory_.data() + at, Bytes{size});
    return std::pair{found.size.n, found.begins_slice};
  };
  EXPECT_EQ(run(kCut - 1, 5), std::pair(std::int64_t{5}, false)) << "of no part";
  const std::span<std::byte> part = memory_.first(2 * kCut + 100);
  pinned.pin({&part, 1}, false);
  EXPECT_EQ(run(0, 5), std::pair(std::int64_t{5}, true));
  EXPECT_EQ(run(kCut - 1, 5), std::pair(std::int64_t{1}, false));
  EXPECT_EQ(run(kCut, 5), std::pair(std::int64_t{5}, true));
  EXPECT_EQ(run(kCut, kSize), std::pair(static_cast<std::int64_t>(kCut), true));
  EXPECT_EQ(run(2 * kCut, 500), std::pair(std::int64_t{100}, true)) << "the part's end";
  EXPECT_EQ(run(part.size(), 5), std::pair(std::int64_t{5}, false)) << "behind the part";
  pinned.unpin({&part, 1});
}

TEST_F(PinnedHostTest, CopiesCrossSlices) {
  const auto device = open_cuda_device(1, false);
  constexpr std::size_t kFrom = kCut - 3 * kMiBytes - 8, kLong = kCut + 7 * kMiBytes;
  auto* words = reinterpret_cast<std::uint64_t*>(memory_.data() + kFrom);
  for (std::size_t i = 0; i < kLong / 8; ++i) {
    words[i] = i * 0x9e3779b97f4a7c15;
  }
  const Registration registration = device->register_host(memory_, false);
  const Bytes size{static_cast<std::int64_t>(kLong)};
  const Buffer there = device->allocate(size, "a test");
  const Copy in{.to = there.data(), .from = words, .bytes = size};
  device->copy(Stream::copy_in, {&in, 1});
  device->finish();
  std::memset(words, 0, kLong);
  const Copy out{.to = words, .from = there.data(), .bytes = size};
  device->copy(Stream::copy_out, {&out, 1});
  device->finish();
  for (std::size_t i = 0; i < kLong / 8; ++i) {
    ASSERT_EQ(words[i], i * 0x9e3779b97f4a7c15) << i;
  }
}

TEST_F(PinnedHostTest, APartMayEndBeforeItsTurn) {
  PinnedHost pinned;
  for (int i = 0; i < 3; ++i) {
    pinned.pin({&memory_, 1}, false);
    pinned.unpin({&memory_, 1});
    EXPECT_FALSE(is_pinned(memory_.data()));
    EXPECT_FALSE(is_pinned(&memory_.back()));
  }
  pinned.need(memory_.data(), Bytes{1});  // of no part: nothing to wait for
}

TEST_F(PinnedHostTest, AFailureToPinIsToldToTheCopyThatNeedsTheMemory) {
  ASSERT_EQ(mprotect(&memory_[kCut], kCut, PROT_NONE), 0);
  PinnedHost pinned;
  pinned.pin({&memory_, 1}, false);
  try {
    pinned.need(&memory_[kCut], Bytes{1});
    FAIL() << "it was pinned";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
    EXPECT_THAT(failure.what(), testing::HasSubstr("cannot be pinned for the GPU"));
  }
  pinned.unpin({&memory_, 1});
}

}  // namespace
}  // namespace poise
