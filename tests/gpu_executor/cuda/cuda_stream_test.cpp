#include "gpu_executor/cuda/cuda_stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>

#include "kernels/cuda/check.h"
#include "tests/support/cuda_test.h"

namespace poise {
namespace {

using cuda::cuda_check;

constexpr std::size_t kWritten = std::size_t{1} << 28;

class CudaStreamTest : public test::CudaTest {
 protected:
  void SetUp() override {
    test::CudaTest::SetUp();
    if (!IsSkipped()) {
      cuda_check(cudaMalloc(&memory_, kWritten), "memory to write");
    }
  }
  void TearDown() override { static_cast<void>(cudaFree(memory_)); }

  void write(CudaStream& stream, int times = 1) {
    for (int i = 0; i < times; ++i) {
      cuda_check(cudaMemsetAsync(memory_, i, kWritten, stream.work()), "writing");
    }
  }
  static void finish() { cuda_check(cudaDeviceSynchronize(), "the device"); }

  void* memory_ = nullptr;
};

TEST_F(CudaStreamTest, EventsWithNothingBetweenThemAreOne) {
  CudaStream stream, other;
  CudaEvent first(true), second(true), third(true), signal(false);
  write(stream);
  stream.record(first);
  stream.record(signal);
  stream.record(second);
  EXPECT_EQ(first.point, second.point);
  write(stream);
  stream.record(third);
  EXPECT_NE(third.point, second.point) << "something was queued";
  write(other);
  other.record(signal);
  stream.wait(signal);
  stream.record(first);
  EXPECT_NE(first.point, third.point) << "it waited";
  finish();
}

TEST_F(CudaStreamTest, BehindAWaitForNothingTheTimeIsToldAnew) {
  CudaStream stream;
  CudaEvent before(true), after(true);
  const CudaEvent never(false);
  stream.record(before);
  stream.wait(never);
  stream.record(after);
  EXPECT_NE(before.point, after.point) << "the stream may have stood idle between them";
}

TEST_F(CudaStreamTest, HoweverOftenEventsChangeStreamsAsFewServe) {
  CudaStream one, other;
  CudaEvent moves(true), stays(true);
  std::set<const RawEvent*> seen;
  for (int round = 0; round < 100; ++round) {
    for (CudaStream* stream : {&one, &other}) {
      stream->work();
      stream->record(moves);
      seen.insert(moves.point.get());
      if (stream == &one) {
        stream->record(stays);  // the same point, which therefore does not go along
      }
      stream->work();
    }
  }
  EXPECT_LT(seen.size(), 10u);
}

TEST_F(CudaStreamTest, WhatStoodAtAnEventStaysWhenItsTwinIsRecordedAgain) {
  CudaStream stream;
  CudaEvent start(true), kept(true), again(true);
  write(stream, 64);  // so that this thread's pauses are none of the stream's
  stream.record(start);
  write(stream);
  stream.record(kept);
  stream.record(again);
  write(stream, 8);
  stream.record(again);
  finish();
  const std::int64_t begin = stream.totals(start).busy_ns;
  const std::int64_t one = stream.totals(kept).busy_ns - begin;
  EXPECT_GT(one, 0);
  EXPECT_GT(stream.totals(again).busy_ns - begin, 3 * one) << "nine times as much was written";
}

TEST_F(CudaStreamTest, AStreamWithNothingToDoNeitherWorksNorWaits) {
  CudaStream stream;
  CudaEvent before(true), after(true), later(true);
  write(stream);
  stream.record(before);
  finish();
  constexpr auto kPause = std::chrono::milliseconds(50);
  std::this_thread::sleep_for(kPause);
  stream.resume();
  write(stream);
  stream.record(after);
  stream.resume();  // amid its work, or at once behind it
  write(stream);
  stream.record(later);
  finish();
  const StreamTotals from = stream.totals(before), to = stream.totals(after);
  EXPECT_GT(to.busy_ns, from.busy_ns);
  EXPECT_LT(to.busy_ns - from.busy_ns, std::chrono::nanoseconds(kPause).count());
  EXPECT_LT(to.wait_ns - from.wait_ns, std::chrono::nanoseconds(kPause).count() / 10);
  EXPECT_GT(stream.totals(later).busy_ns, to.busy_ns);
}

TEST_F(CudaStreamTest, WaitingBesideARestIsStillWaiting) {
  CudaStream stream, other;
  CudaEvent start(true), waited(true), after(true), signal(false);
  write(stream);
  stream.record(start);
  write(other, 40);
  other.record(signal);
  stream.wait(signal);
  stream.record(waited);  // and nothing behind it
  finish();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  stream.resume();
  write(other, 40);
  other.record(signal);
  stream.wait(signal);
  write(stream);
  stream.record(after);
  finish();
  const StreamTotals from = stream.totals(start);
  static_cast<void>(stream.totals(waited));
  const StreamTotals to = stream.totals(after);
  const std::int64_t once = to.busy_ns - from.busy_ns;  // one writing
  EXPECT_GT(to.wait_ns - from.wait_ns, 40 * once) << "eighty writings were waited for";
  EXPECT_LT(to.wait_ns - from.wait_ns, 40'000'000 + 90 * once) << "the rest was none of it";
}

TEST_F(CudaStreamTest, WaitingForAnotherStreamIsNoWork) {
  CudaStream stream, other;
  CudaEvent before(true), after(true), signal(false);
  write(stream);
  stream.record(before);
  write(other, 40);
  other.record(signal);
  stream.wait(signal);
  write(stream);
  stream.record(after);
  finish();
  const StreamTotals from = stream.totals(before), to = stream.totals(after);
  EXPECT_GT(to.wait_ns - from.wait_ns, 2 * (to.busy_ns - from.busy_ns));
  EXPECT_GT(to.busy_ns, from.busy_ns);
}

}  // namespace
}  // namespace poise
