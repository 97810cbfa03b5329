#include "gpu_executor/cpu/cpu_device.h"

#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "common/liveness/progress.h"
#include "common/liveness/thread_time.h"
#include "common/trouble.h"
#include "gpu_executor/cpu/cpu_stream.h"
#include "kernels/cpu/packed_matrix.h"

namespace poise {
namespace {

std::unique_ptr<CpuDevice> small_device(CpuDeviceOptions options = {}) {
  options.memory = kMiB;
  return open_cpu_device(options);
}

Bytes bytes_of(const std::vector<int>& numbers) {
  return {static_cast<std::int64_t>(numbers.size() * sizeof(int))};
}

TEST(CpuDevice, MemoryIsCountedAndGivenBack) {
  const auto device = small_device();
  {
    const Buffer a = device->allocate({1000}, "a");
    Buffer b = device->allocate({500}, "b");
    EXPECT_EQ(device->in_use(), Bytes{1500});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 256, 0u);
    b = device->allocate({100}, "c");
    EXPECT_EQ(device->in_use(), Bytes{1100});
  }
  EXPECT_EQ(device->in_use(), Bytes{0});
  EXPECT_EQ(device->peak(), Bytes{1600});
}

TEST(CpuDevice, MemoryBeyondTheCapOrTheDeviceIsRefusedWithNumbers) {
  const auto device = small_device();
  const Buffer held = device->allocate({400}, "held");
  device->set_cap({1000});
  try {
    device->allocate({601}, "the rest");
    FAIL() << "601 bytes were had beside 400 of 1000";
  } catch (const Failure& failure) {
    EXPECT_STREQ(failure.what(),
                 "601 bytes of device memory for the rest are beyond the cap: 400 of 1000 bytes "
                 "are in use");
  }
  EXPECT_EQ(device->allocate({600}, "the rest").size(), Bytes{600});
  device->set_cap(kGiB);
  EXPECT_THROW(device->allocate(kMiB, "all of it"), Failure);
}

TEST(CpuDevice, PoisonedMemoryHoldsNaNs) {
  const auto device = small_device({.poison = true});
  const Buffer buffer = device->allocate({64}, "floats");
  float value;
  std::memcpy(&value, buffer.data(), sizeof value);
  EXPECT_TRUE(std::isnan(value));
}

TEST(CpuDevice, AStreamWaitsForWhatAnotherRecorded) {
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    const auto device = small_device({.jitter = seed});
    std::vector<int> a(1000, 7), b(1000), c(1000);
    const auto copied = device->make_event();
    const Copy first{.to = b.data(), .from = a.data(), .bytes = bytes_of(a)};
    const Copy second{.to = c.data(), .from = b.data(), .bytes = bytes_of(b)};
    device->hold();
    device->copy(Stream::copy_in, {&first, 1});
    device->record(*copied, Stream::copy_in);
    device->wait(Stream::copy_out, *copied);
    device->copy(Stream::copy_out, {&second, 1});
    device->release_streams();
    device->finish();
    EXPECT_EQ(c, a);
  }
}

TEST(CpuDevice, AnEventMeansItsLastRecord) {
  const auto device = small_device();
  const auto event = device->make_event();
  EXPECT_TRUE(device->reached(*event)) << "never recorded";
  device->record(*event, Stream::copy_in);
  EXPECT_TRUE(device->reached(*event, {10}));
  device->hold();
  device->record(*event, Stream::copy_in);
  EXPECT_FALSE(device->reached(*event, {0.01}));
  device->release_streams();
  EXPECT_TRUE(device->reached(*event, {10}));
}

TEST(CpuDevice, TotalsCountBytesWorkAndWaiting) {
  const auto device = small_device({.link_bytes_per_s = 1e6});
  std::vector<int> a(50'000), b(50'000);  // 200 kB: 200 ms, in which the other thread comes to wait
  const Copy copy{.to = b.data(), .from = a.data(), .bytes = bytes_of(a)};
  const auto copied = device->make_event(), waited = device->make_event();
  device->hold();
  device->copy(Stream::copy_in, {&copy, 1});
  device->record(*copied, Stream::copy_in);
  device->wait(Stream::compute, *copied);
  device->record(*waited, Stream::compute);
  device->release_streams();
  device->finish();
  const StreamTotals in = device->totals(*copied), compute = device->totals(*waited);
  EXPECT_EQ(in.bytes, 200'000);
  EXPECT_GE(in.busy_ns, 200'000'000);
  EXPECT_EQ(in.wait_ns, 0);
  EXPECT_EQ(compute.bytes, 0);
  EXPECT_EQ(compute.busy_ns, 0);
  EXPECT_GE(compute.wait_ns, 5'000'000);
}

TEST(CpuDevice, ASignalIsWaitedForButNeverAskedWhatOrWhen) {
  const auto device = small_device();
  const auto signal = device->make_signal();
  device->record(*signal, Stream::copy_in);
  device->wait(Stream::compute, *signal);
  EXPECT_TRUE(device->reached(*signal, {10}));
  EXPECT_THROW(device->totals(*signal), Defect);
  EXPECT_THROW(device->time_of(*signal), Defect);
}

TEST(CpuDevice, ASetSpeedOfArithmeticIsKept) {
  const auto device = small_device({.compute_flops = 1e6});
  std::vector<float> weight(16 * 25), in(25), out(16);
  const auto done = device->make_event();
  device->launch(Gemm{.out = {.data = out.data(), .stride = 16},
                      .in = {.data = in.data(), .stride = 25},
                      .weight = {.data = weight.data(), .rows = 16, .cols = 25},
                      .rows = 1});
  device->record(*done, Stream::compute);
  device->finish();
  EXPECT_GE(device->totals(*done).busy_ns, 800'000);  // 2 · 16 · 25 operations
}

TEST(CpuDevice, AMatrixIsUploadedInPanelsAndAVectorAsItIs) {
  const auto device = small_device();
  std::vector<float> matrix(20 * 3), vector{1, 2, 3};
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    matrix[i] = static_cast<float>(i);
  }
  std::vector<float> panels(32 * 3), expected(32 * 3), copied(3);
  const WeightCopy copies[] = {{.to = panels.data(),
                                .from = matrix.data(),
                                .rows = 20,
                                .cols = 3,
                                .dtype = DType::float32,
                                .panelled = true},
                               {.to = copied.data(),
                                .from = vector.data(),
                                .rows = 1,
                                .cols = 3,
                                .dtype = DType::float32,
                                .panelled = false}};
  device->upload(Stream::copy_in, copies);
  device->finish();
  cpu::pack_matrix(expected.data(), matrix.data(), 20, 3, DType::float32);
  EXPECT_EQ(panels, expected);
  EXPECT_EQ(copied, vector);
}

TEST(CpuDevice, AFailureIsToldOnceAndNothingHangs) {
  const auto device = small_device();
  std::vector<float> numbers(64);
  const auto after = device->make_event();
  // A row wider than its stride: what the kernels refuse.
  device->launch(Gemm{.out = {.data = numbers.data(), .stride = 1},
                      .in = {.data = numbers.data(), .stride = 2},
                      .weight = {.data = numbers.data(), .rows = 16, .cols = 2},
                      .rows = 1});
  device->record(*after, Stream::compute);
  EXPECT_TRUE(device->reached(*after, {10}));
  const auto sentence = device->failure();
  ASSERT_TRUE(sentence.has_value());
  EXPECT_THAT(*sentence, testing::HasSubstr("as wide as its weight says"));
  EXPECT_FALSE(device->failure().has_value()) << "told twice";

  std::vector<int> from{1}, to{0};
  const Copy copy{.to = to.data(), .from = from.data(), .bytes = {4}};
  device->copy(Stream::copy_out, {&copy, 1});
  device->finish();
  EXPECT_EQ(to[0], 0) << "something ran behind the failure";
}

TEST(CpuDevice, WhatStaysOnTheDeviceDoesNotTakeTheLinksTime) {
  const auto device = small_device({.link_bytes_per_s = 1});
  std::vector<int> a{5, 6}, b{0, 0};
  const std::vector<Copy> copies{{.to = &b[0], .from = &a[1], .bytes = {4}},
                                 {.to = &b[1], .from = &a[0], .bytes = {4}}};
  const auto copied = device->make_event();
  device->copy_here(Stream::copy_out, copies);
  device->record(*copied, Stream::copy_out);
  EXPECT_TRUE(device->reached(*copied, {4})) << "eight bytes take the link eight seconds";
  EXPECT_EQ(b, (std::vector{6, 5}));
  EXPECT_EQ(device->totals(*copied).bytes, 8);
}

TEST(CpuDevice, ASynchronousDeviceIsDoneWhenTheCallReturns) {
  const auto device = small_device({.synchronous = true});
  std::vector<int> a{5}, b{0};
  const Copy copy{.to = b.data(), .from = a.data(), .bytes = {4}};
  device->copy(Stream::copy_in, {&copy, 1});
  EXPECT_EQ(b[0], 5);
}

TEST(CpuDevice, SaysHowManyThreadsItHasAndRefusesNone) {
  EXPECT_EQ(small_device({.threads = 1})->name(), "cpu, 1 thread");
  EXPECT_EQ(small_device({.threads = 2})->name(), "cpu, 2 threads");
  EXPECT_THROW(small_device({.threads = 0}), Failure);
}

TEST(CpuStream, AFullQueueMakesItsFillerWait) {
  Trouble trouble;
  CpuStream stream("test", trouble, false, std::nullopt);
  std::int64_t ran = 0;  // the stream's thread, until finish
  for (int i = 0; i < 20'000; ++i) {
    stream.push([&] { ++ran; }, {0}, 0);
  }
  stream.finish();
  EXPECT_EQ(ran, 20'000);
}

struct Answered {
  std::chrono::nanoseconds took{}, really{};
  StreamTotals totals;
};

// Two streams, each of which waits this many times for the other's work.
Answered answer_one_another(int times, std::int64_t one_ns, std::int64_t other_ns) {
  Trouble trouble;
  CpuStream one("one", trouble, true, std::nullopt), other("other", trouble, true, std::nullopt);
  CpuEvent begin(true), end(true);
  std::deque<CpuEvent> done, answered;
  one.hold();
  other.hold();
  one.record(begin);
  for (int i = 0; i < times; ++i) {
    one.push([] {}, {1}, one_ns);
    one.record(done.emplace_back(true));
    other.wait(done.back());
    other.push([] {}, {1}, other_ns);
    other.record(answered.emplace_back(true));
    one.wait(answered.back());
  }
  one.record(end);
  const auto before = CpuStream::Clock::now();
  other.release();
  one.release();
  one.finish();
  return {.took = end.last->at - begin.last->at,
          .really = CpuStream::Clock::now() - before,
          .totals = end.last->totals};
}

// As if no thread were ever late: to the nanosecond.
TEST(CpuStream, ASetSpeedIsKeptHoweverLateThreadsWake) {
  constexpr int kTimes = 50;
  constexpr std::int64_t kOne = 1'000'000, kOther = 300'000;  // ns: more than their work takes
  constexpr std::chrono::nanoseconds kWhole(kTimes * (kOne + kOther));
  const Answered found = answer_one_another(kTimes, kOne, kOther);
  EXPECT_GE(found.really, found.took) << "it is ahead of the time";
  EXPECT_EQ(found.took, kWhole);
  EXPECT_EQ(found.totals.busy_ns, kTimes * kOne);
  EXPECT_EQ(found.totals.wait_ns, kTimes * kOther);
}

TEST(CpuStream, ASlowDeviceShowsThatItMoves) {
  Trouble trouble;
  CpuStream stream("slow", trouble, true, std::nullopt);
  stream.push([] {}, Bytes{1}, 3'000'000'000);
  int noted = 0;
  for (int i = 0; i < 2400; ++i) {  // before its work is done
    noted += take_progress() ? 1 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(noted, 3);
  stream.finish();
}

// The stream that waits is late, and finds the event recorded once more.
TEST(CpuStream, WaitsForTheRecordThatWasMeantAlone) {
  Trouble trouble;
  CpuStream one("one", trouble, true, std::nullopt), other("other", trouble, true, std::nullopt);
  CpuEvent again(true), end(true);
  other.hold();
  one.record(again);
  other.wait(again);
  other.record(end);
  one.push([] {}, {1}, 1'000'000);
  one.record(again);
  one.finish();
  other.end_soon();  // as if it had not been woken until now
  other.finish();
  EXPECT_EQ(end.last->totals.wait_ns, 0) << "the first was reached before the wait was queued";
}

// Works until this thread has used as much time of a core.
void use_core(std::chrono::milliseconds time) {
  for (const auto begin = thread_time(); thread_time() - begin < time;) {
  }
}

TEST(CpuStream, WorkThatTakesLongerThanASetSpeedAllowsTakesItsTime) {
  Trouble trouble;
  CpuStream stream("test", trouble, true, std::nullopt);
  CpuEvent begin(true), end(true);
  stream.record(begin);
  stream.push([] { use_core(std::chrono::milliseconds(5)); }, {1}, 1000);
  stream.push([] { use_core(std::chrono::milliseconds(5)); }, {1}, 0);
  stream.record(end);
  stream.finish();
  EXPECT_GE(end.last->totals.busy_ns, 10'000'000);
  EXPECT_GE(end.last->at - begin.last->at, std::chrono::milliseconds(10));
}

TEST(CpuStream, AThreadThatIsStoppedAmidItsWorkKeepsASetSpeed) {
  Trouble trouble;
  CpuStream stream("test", trouble, true, std::nullopt);
  CpuEvent end(true);
  stream.push([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, {1}, 5'000'000);
  stream.record(end);
  stream.finish();
  EXPECT_EQ(end.last->totals.busy_ns, 5'000'000);
}

}  // namespace
}  // namespace poise
