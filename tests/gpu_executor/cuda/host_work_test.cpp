#include "gpu_executor/cuda/host_work.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_executor/cuda/cuda_device.h"
#include "kernels/cuda/check.h"
#include "tests/gpu_executor/pipeline_run.h"
#include "tests/support/cuda_test.h"

namespace poise {
namespace {

using cuda::cuda_check;
using test::PipelineRun;

constexpr std::size_t kBytes = std::size_t{1} << 24;

class HostWorkTest : public test::CudaTest {
 protected:
  void SetUp() override {
    test::CudaTest::SetUp();
    if (!IsSkipped()) {
      cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
      cuda_check(cudaMalloc(&there_, kBytes));
      cuda_check(cudaHostAlloc(reinterpret_cast<void**>(&here_), kBytes, cudaHostAllocDefault));
    }
  }
  void TearDown() override {
    if (!IsSkipped()) {
      finish();
      cuda_check(cudaStreamDestroy(stream_));
      cuda_check(cudaFree(there_));
      cuda_check(cudaFreeHost(here_));
    }
  }

  void set(int value) { cuda_check(cudaMemsetAsync(there_, value, kBytes, stream_)); }
  void down() {
    cuda_check(cudaMemcpyAsync(here_, there_, kBytes, cudaMemcpyDeviceToHost, stream_));
  }
  void up() { cuda_check(cudaMemcpyAsync(there_, here_, kBytes, cudaMemcpyHostToDevice, stream_)); }
  void finish() { cuda_check(cudaStreamSynchronize(stream_)); }

  cudaStream_t stream_ = nullptr;
  void* there_ = nullptr;
  unsigned char* here_ = nullptr;  // (kBytes) pinned
};

TEST_F(HostWorkTest, TheHostWorksBehindWhatTheStreamDidAndBeforeWhatItWillDo) {
  HostWork work;
  std::vector<int> seen;
  for (int i = 1; i <= 50; ++i) {
    set(i);
    down();
    work.queue(stream_, [&, i] {
      seen.push_back(here_[kBytes - 1]);
      std::memset(here_, 100 + i, kBytes);
    });
    up();
    work.queue(stream_, [&] { std::memset(here_, 0, kBytes); });
    down();
    work.queue(stream_, [&, i] { EXPECT_EQ(here_[kBytes - 1], 100 + i); });
  }
  finish();
  ASSERT_EQ(seen.size(), 50u);
  for (int i = 1; i <= 50; ++i) {
    EXPECT_EQ(seen[static_cast<std::size_t>(i) - 1], i);
  }
  EXPECT_EQ(work.failure(), std::nullopt);
}

TEST_F(HostWorkTest, AStreamDoesNotWaitForWorkThatFailed) {
  HostWork work;
  int done = 0;
  work.queue(stream_, [&] { ++done; });
  work.queue(stream_, [] { throw std::runtime_error("the work failed"); });
  work.queue(stream_, [&] { ++done; });
  set(7);
  down();
  finish();
  EXPECT_EQ(here_[0], 7);
  EXPECT_EQ(done, 1) << "nothing works behind a failure";
  EXPECT_EQ(work.failure(), "the work failed");
  EXPECT_EQ(work.failure(), std::nullopt) << "it is told once";
}

TEST_F(HostWorkTest, AStreamWaitsAsLongAsTheWorkTakes) {
  static constexpr std::chrono::milliseconds kLong{30};
  HostWork work;
  const auto begin = std::chrono::steady_clock::now();
  work.queue(stream_, [] { std::this_thread::sleep_for(kLong); });
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  finish();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kLong);
}

TEST_F(HostWorkTest, RowsComeUpOnTheComputeStreamBesideLoadsThatWereQueuedBefore) {
  const auto device = open_cuda_device(1, false);
  const Bytes large{std::int64_t{1} << 30}, small{std::int64_t{240} << 10};
  const HostBuffer loaded = device->allocate_host(large), rows = device->allocate_host(small);
  const Buffer there = device->allocate(large, "a test"), up = device->allocate(small, "a test");
  std::memset(rows.data(), 7, static_cast<std::size_t>(small.n));
  const auto behind_loads = device->make_event(), behind_rows = device->make_event();
  const Copy load{.to = there.data(), .from = loaded.data(), .bytes = large};
  const Copy come_up{.to = up.data(), .from = rows.data(), .bytes = small};
  device->copy(Stream::compute, {&come_up, 1});  // the driver loads the kernel, which may take as long
  device->finish();
  for (int i = 0; i < 4; ++i) {  // some 20 ms each
    device->copy(Stream::copy_in, {&load, 1});
  }
  device->record(*behind_loads, Stream::copy_in);
  device->copy(Stream::compute, {&come_up, 1});
  device->record(*behind_rows, Stream::compute);
  device->finish();
  EXPECT_GT(device->time_of(*behind_loads) - device->time_of(*behind_rows), 10'000'000);
  const Copy down{.to = rows.data(), .from = up.data(), .bytes = small};
  std::memset(rows.data(), 0, static_cast<std::size_t>(small.n));
  device->copy(Stream::copy_out, {&down, 1});
  device->finish();
  const auto* bytes = reinterpret_cast<const unsigned char*>(rows.data());
  EXPECT_EQ(std::count(bytes, bytes + small.n, 7), small.n);
}

class AttendedOnHostCores : public test::CudaTest {
 protected:
  // Of a logprob: where sums of another order round to another number, of three layers.
  static float tolerance(DType dtype, KvFormat format = KvFormat::plain) {
    if (format != KvFormat::plain) {  // a row's code may be the next
      return format == KvFormat::int8 ? 0.1F : 0.5F;
    }
    return dtype == DType::float32 ? 1e-3F : dtype == DType::float16 ? 0.02F : 0.1F;
  }

  test::Outcome run(const test::TinyModel& model, KvFormat format,
                    std::function<bool(std::uint32_t)> on_host) {
    test::Plan plan{.sequences = sequences_};
    plan.kind = test::all_kv;
    plan.chunk = 7;
    plan.chunks_at_once = 2;
    plan.on_host = std::move(on_host);
    test::Setting setting;
    setting.limits.host_attention = plan.on_host != nullptr;
    setting.limits.kv_format = format;
    return PipelineRun(model, plan, setting, open_cuda_device(2, false)).run();
  }

  // The logprobs that both tell, of the same tokens.
  static void expect_near(const test::Outcome& one, const test::Outcome& other, float tolerance) {
    ASSERT_EQ(one.rows.size(), other.rows.size());
    for (const auto& [place, bits] : one.rows) {
      const auto& theirs = other.rows.at(place);
      if (bits.at(0) == theirs.at(0)) {  // the last token of each is sampled
        EXPECT_NEAR(std::bit_cast<float>(bits[1]), std::bit_cast<float>(theirs[1]), tolerance);
      }
    }
  }

  // Heads of a multiple of 32 are attended from their codes.
  static ModelShape shape_of(std::int32_t head_dim) {
    ModelShape shape = test::tiny_shape();
    shape.head_dim = head_dim;
    shape.hidden_size = shape.word_embed_proj_dim = shape.num_attention_heads * head_dim;
    return shape;
  }

  static test::TinyModel model_of(DType dtype, bool rotary) {
    return {rotary ? test::rotary_shape() : test::tiny_shape(), dtype, 5};
  }

  const std::vector<std::vector<std::int32_t>> sequences_ =
      test::random_sequences(test::tiny_shape(), {5, 21, 40, 33}, 3);
};

TEST_F(AttendedOnHostCores, LogprobsAreThoseOfTheDeviceWithinATolerance) {
  const auto some = [](std::uint32_t request) { return request % 2 == 1; };
  const auto all = [](std::uint32_t) { return true; };
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const bool rotary : {false, true}) {
      const test::TinyModel model = model_of(dtype, rotary);
      const test::Outcome device = run(model, KvFormat::plain, nullptr);
      expect_near(device, run(model, KvFormat::plain, all), tolerance(dtype));
      expect_near(device, run(model, KvFormat::plain, some), tolerance(dtype));
    }
  }
  for (const KvFormat format : {KvFormat::int8, KvFormat::int4}) {
    for (const std::int32_t head_dim : {8, 32}) {
      const test::TinyModel model(shape_of(head_dim), DType::float16, 5);
      expect_near(run(model, format, nullptr), run(model, format, all),
                  tolerance(DType::float16, format));
    }
  }
}

TEST_F(AttendedOnHostCores, TheSamePlanGivesTheSameBits) {
  const test::TinyModel model = model_of(DType::float16, true);
  const auto some = [](std::uint32_t request) { return request != 1; };
  EXPECT_EQ(run(model, KvFormat::plain, some).rows, run(model, KvFormat::plain, some).rows);
  const test::TinyModel wide(shape_of(32), DType::float16, 5);
  EXPECT_EQ(run(wide, KvFormat::int8, some).rows, run(wide, KvFormat::int8, some).rows);
}

}  // namespace
}  // namespace poise
