#include "gpu_executor/cuda/cuda_device.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "common/device_memory.h"
#include "common/trouble.h"
#include "common/words.h"
#include "gpu_executor/cuda/cuda_clock.h"
#include "gpu_executor/cuda/cuda_stream.h"
#include "gpu_executor/cuda/gpu_memory.h"
#include "gpu_executor/cuda/host_work.h"
#include "gpu_executor/cuda/pinned_host.h"
#include "kernels/cpu/workers.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/host/host_attention.h"

namespace poise {
namespace {

using cuda::cuda_check;

// Code of library kernels is loaded as they are first used; this much is set aside for it.
constexpr Bytes kLaterCode = kMiB * 96;
// What a context takes where NVML does not say.
constexpr Bytes kUsualContext = kMiB * 640;
constexpr auto kPause = std::chrono::microseconds(20);

int visible_gpus(cudaError_t* code) {
  int count = 0;
  *code = cudaGetDeviceCount(&count);
  if (*code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::string pci_bus_id() {
  std::array<char, 32> id{};
  cuda_check(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), 0), "naming the GPU");
  return id.data();
}

// Neighbouring pieces become one, but for those that are to begin `anew`; empty ones none.
class Pieces {
 public:
  void add(void* to, const void* from, Bytes bytes, bool anew = false) {
    if (bytes.n == 0) {
      return;
    }
    const auto size = static_cast<std::size_t>(bytes.n);
    auto* destination = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    if (!anew && !to_.empty() &&
        static_cast<std::byte*>(to_.back()) + sizes_.back() == destination &&
        static_cast<const std::byte*>(from_.back()) + sizes_.back() == source) {
      sizes_.back() += size;
    } else {
      to_.push_back(destination);
      from_.push_back(source);
      sizes_.push_back(size);
    }
    total_ += bytes;
  }

  Bytes total() const { return total_; }

  // All of device memory. One piece is the driver's; it would take several one by one.
  void queue_here(cudaStream_t stream) {
    if (to_.size() == 1) {
      queue(stream);
      return;
    }
    queue_kernel(stream);
  }

  // The GPU's own threads copy, over the link where a piece lies in pinned host memory.
  void queue_kernel(cudaStream_t stream) {
    std::vector<cuda::DeviceCopy> pieces;
    for (std::size_t i = 0; i < to_.size(); ++i) {
      pieces.push_back({to_[i], from_[i], static_cast<std::int64_t>(sizes_[i])});
    }
    cuda::copy_batch(pieces, stream);
  }

  void queue(cudaStream_t stream) {
    if (to_.size() == 1) {
      cuda_check(cudaMemcpyAsync(to_[0], from_[0], sizes_[0], cudaMemcpyDefault, stream),
                 "queueing a copy");
      return;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    cuda_check(cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), to_.size(),
                                    &attributes, &first, 1, stream),
               "queueing copies");
  }

 private:
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::size_t> sizes_;
  Bytes total_{};
};

class Opened final : public Device {
 public:
  Opened(int host_threads, bool named)
      : bus_(pci_bus_id()), host_threads_(host_threads), host_threads_named_(named) {
    const auto before = gpu_memory_in_use(bus_);
    cuda_check(cudaSetDevice(0), "choosing the GPU");
    cuda_check(cudaSetDeviceFlags(cudaDeviceScheduleYield), "setting up the GPU");
    cuda_check(cudaFree(nullptr), "starting the GPU");
    cuda_check(cudaGetDeviceProperties(&properties_, 0), "describing the GPU");
    for (auto& stream : streams_) {
      stream = std::make_unique<CudaStream>();
    }
    host_work_ = std::make_unique<HostWork>();
    clock_ = std::make_unique<CudaClock>();
    clock_begins();
    gemms_ = std::make_unique<cuda::Gemms>();
    cuda_check(cudaDeviceSynchronize(), "starting the GPU");
    const auto after = gpu_memory_in_use(bus_);
    const bool known = before && after && *after > *before;
    overhead_ = (known ? *after - *before : kUsualContext + cuda::Gemms::kWorkspace) + kLaterCode;
    link_bytes_per_s_ = measured_link();
    std::size_t free = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free, &total), "asking for free memory");
    memory_ = Bytes{static_cast<std::int64_t>(free)} + overhead_ - kLaterCode;
    spdlog::info(
        "GPU {} at {}: {} multiprocessors, {} of {} bytes free, {} taken by context and libraries "
        "({}), link {:.1f} GB/s, cuBLASLt {}",
        properties_.name, bus_, properties_.multiProcessorCount, free, total, overhead_.n,
        known ? "measured" : "assumed", link_bytes_per_s_ * 1e-9, gemms_->version());
  }

  ~Opened() override {
    static_cast<void>(cudaDeviceSynchronize());
    gemms_.reset();
    clock_.reset();
  }

  std::string name() const override {
    // What was measured with another number of threads does not hold.
    return fmt::format("cuda: {}", properties_.name) +
           (host_threads_named_ ? fmt::format(", {} on host cores", counted(host_threads_, "thread"))
                                : "");
  }
  DeviceKind kind() const override { return DeviceKind::cuda; }
  Bytes memory() const override { return memory_; }
  Bytes overhead() const override {
    return overhead_ + page_tables_of(pinned_.bytes() + expected_);
  }
  void expect_registered(Bytes more) override { expected_ = more; }
  DType work_type(DType stored) const override { return stored; }
  int host_threads() const override { return host_threads_; }
  double link_bytes_per_s() const override { return link_bytes_per_s_; }

  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(true); }
  std::unique_ptr<Event> make_signal() override { return std::make_unique<CudaEvent>(false); }
  void record(Event& event, Stream stream) override {
    stream_of(stream).record(static_cast<CudaEvent&>(event));
  }
  void wait(Stream stream, const Event& event) override {
    stream_of(stream).wait(static_cast<const CudaEvent&>(event));
  }
  void resume() override {
    for (auto& stream : streams_) {
      stream->resume();
    }
  }

  bool reached(const Event& event, Seconds timeout) override {
    const auto& asked = static_cast<const CudaEvent&>(event);
    if (!asked.recorded) {
      return true;
    }
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout.n);
    while (true) {
      const cudaError_t code = cudaEventQuery(asked.point->get());
      if (code == cudaSuccess) {
        return true;
      }
      if (code != cudaErrorNotReady) {
        cuda_check(code, "the work before an event");
      }
      if (std::chrono::steady_clock::now() >= until) {
        return false;
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  StreamTotals totals(const Event& event) override {
    // What was asked for is kept in the event; that is no change that a caller sees.
    auto& asked = const_cast<CudaEvent&>(static_cast<const CudaEvent&>(event));
    check(asked.recorded, "totals are asked of an event that was reached");
    return asked.stream->totals(asked);
  }

  std::int64_t time_of(const Event& event) override {
    const auto& asked = static_cast<const CudaEvent&>(event);
    check(asked.timed && asked.recorded, "the time is asked of an event that tells it");
    return clock_->time_of(*asked.point);
  }

  void finish() override { cuda_check(cudaDeviceSynchronize(), "the work that was queued"); }

  void copy(Stream stream, std::span<const Copy> copies) override {
    Pieces pieces;
    if (stream == Stream::compute) {
      for (const Copy& one : copies) {
        pieces.add(one.to, one.from, one.bytes);
      }
      if (pieces.total().n > 0) {  // a copy engine would come to them behind milliseconds of loads
        pieces.queue_kernel(stream_of(stream).work(pieces.total()));
      }
      return;
    }
    for (const Copy& one : copies) {
      add(pieces, one.to, one.from, one.bytes, stream == Stream::copy_out ? one.to : one.from);
    }
    queue(stream, pieces);
  }

  void copy_here(Stream stream, std::span<const Copy> copies) override {
    Pieces pieces;
    for (const Copy& one : copies) {
      pieces.add(one.to, one.from, one.bytes);
    }
    if (pieces.total().n > 0) {
      pieces.queue_here(stream_of(stream).work(pieces.total()));
    }
  }

  void upload(Stream stream, std::span<const WeightCopy> weights) override {
    Pieces pieces;
    for (const WeightCopy& one : weights) {
      add(pieces, one.to, one.from, one.bytes(), one.from);
    }
    queue(stream, pieces);
  }

  void launch(const EmbedTokens& op) override { cuda::embed_tokens(op, compute()); }
  void launch(const AddPositions& op) override { cuda::add_positions(op, compute()); }
  void launch(const LayerNorm& op) override { cuda::layer_norm(op, compute()); }
  void launch(const RmsNorm& op) override { cuda::rms_norm(op, compute()); }
  void launch(const Convert& op) override { cuda::convert(op, compute()); }
  void launch(const GatedActivation& op) override { cuda::gated_activation(op, compute()); }
  void launch(const Rotate& op) override { cuda::rotate(op, compute()); }
  void launch(const Gemm& op) override { gemms_->run(op, compute()); }
  void launch(const QuantizeKv& op) override { cuda::quantize_kv(op, compute()); }
  void launch(const Unpack& op) override { cuda::unpack(op, compute()); }
  void launch(const ScatterRows& op) override { cuda::scatter_rows(op, compute()); }
  void launch(const Attention& op) override { cuda::attention(op, compute()); }
  void launch(const AbsorbedAttention& op) override { cuda::absorbed_attention(op, compute()); }
  void launch(const SampleTokens& op) override { cuda::sample_tokens(op, compute()); }
  // The bytes are those that host cores read; none are copied.
  void launch(const HostAttention& op) override {
    host_work_->queue(stream_of(Stream::host).work({op.bytes}), [this, op] {
      if (!host_workers_) {
        host_workers_.emplace(host_threads_);
      }
      host::host_attention(op, *host_workers_);
    });
  }

  void range_push(const char* name) override { nvtxRangePushA(name); }
  void range_pop() override { nvtxRangePop(); }

  // Calls of CUDA fail by themselves.
  std::optional<std::string> failure() override { return host_work_->failure(); }

 protected:
  std::byte* take(Bytes size) override {
    void* data = nullptr;
    const cudaError_t code = cudaMalloc(&data, static_cast<std::size_t>(size.n));
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    cuda_check(code, "taking memory of the GPU");
    return static_cast<std::byte*>(data);
  }
  void give(std::byte* data, Bytes) override { static_cast<void>(cudaFree(data)); }

  std::byte* take_host(Bytes size) override {
    void* data = nullptr;
    const auto bytes = static_cast<std::size_t>(size.n);
    if (cudaHostAlloc(&data, bytes, cudaHostAllocPortable) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    return static_cast<std::byte*>(data);
  }
  void give_host(std::byte* data, Bytes) override { static_cast<void>(cudaFreeHost(data)); }

  void pin(std::span<const std::span<std::byte>> parts, bool read_only) override {
    pinned_.pin(parts, read_only);
  }
  void unpin(std::span<const std::span<std::byte>> parts) override { pinned_.unpin(parts); }

 private:
  // The best of some large copies to the device.
  static double measured_link() {
    constexpr std::size_t kSize = std::size_t{64} << 20;
    void *host = nullptr, *here = nullptr;
    cuda_check(cudaHostAlloc(&host, kSize, cudaHostAllocDefault), "memory to measure the link");
    const cudaError_t had = cudaMalloc(&here, kSize);
    double best = 0;
    for (int i = 0; had == cudaSuccess && i < 6; ++i) {
      const RawEvent begin, end;
      cuda_check(cudaEventRecord(begin.get(), nullptr), "measuring the link");
      cuda_check(cudaMemcpyAsync(here, host, kSize, cudaMemcpyHostToDevice, nullptr),
                 "measuring the link");
      cuda_check(cudaEventRecord(end.get(), nullptr), "measuring the link");
      cuda_check(cudaEventSynchronize(end.get()), "measuring the link");
      float ms = 0;
      cuda_check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "measuring the link");
      best = std::max(best, static_cast<double>(kSize) / (static_cast<double>(ms) * 1e-3));
    }
    static_cast<void>(cudaFree(here));
    static_cast<void>(cudaFreeHost(host));
    static_cast<void>(cudaGetLastError());
    return best;
  }

  CudaStream& stream_of(Stream stream) { return *streams_[static_cast<std::size_t>(stream)]; }
  cudaStream_t compute() { return stream_of(Stream::compute).work(); }

  // In parts that each lie within one registration of the host's memory, where `host` is.
  void add(Pieces& pieces, void* to, const void* from, Bytes bytes, const void* host) {
    pinned_.need(host, bytes);
    for (Bytes done{}; done < bytes;) {
      const PinnedHost::Run run =
          pinned_.run(static_cast<const std::byte*>(host) + done.n, bytes - done);
      pieces.add(static_cast<std::byte*>(to) + done.n, static_cast<const std::byte*>(from) + done.n,
                 run.size, run.begins_slice);
      done += run.size;
    }
  }

  void queue(Stream stream, Pieces& pieces) {
    if (pieces.total().n > 0) {
      pieces.queue(stream_of(stream).work(pieces.total()));
    }
  }

  const std::string bus_;
  const int host_threads_;
  const bool host_threads_named_;
  cudaDeviceProp properties_{};
  std::array<std::unique_ptr<CudaStream>, kStreams> streams_;
  std::unique_ptr<CudaClock> clock_;
  std::unique_ptr<cuda::Gemms> gemms_;
  Bytes overhead_{}, memory_{};
  Bytes expected_{};  // of host memory that will be registered
  double link_bytes_per_s_ = 0;
  PinnedHost pinned_;
  std::optional<cpu::Workers> host_workers_;  // the host work's thread only
  std::unique_ptr<HostWork> host_work_;
};

}  // namespace

std::optional<std::string> cuda_is_missing() {
  // All our kernels are loaded with the context, so that their memory is counted from the start.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  cudaError_t code = cudaSuccess;
  if (visible_gpus(&code) > 0) {
    if constexpr (POISE_CUDA_CHECKED) {  // right, but slow beyond use
      return "this build is for tests without a GPU, `poise setup` makes one for use";
    }
    return std::nullopt;
  }
  return code == cudaSuccess ? "no GPU is visible"
                             : fmt::format("no GPU can be used: {}", cudaGetErrorString(code));
}

std::unique_ptr<Device> open_cuda_device(int host_threads, bool named) {
  check(host_threads >= 1, "a device with host cores has at least one thread there");
  if (const auto why = cuda_is_missing()) {
    fail("--device cuda: {}; use --device cpu, or look at nvidia-smi and CUDA_VISIBLE_DEVICES",
         *why);
  }
  return std::make_unique<Opened>(host_threads, named);
}

}  // namespace poise
