#include "gpu_executor/cpu/cpu_device.h"

#include <fmt/core.h>

#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "common/shared_memory.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"
#include "gpu_executor/cpu/cpu_stream.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/host/host_attention.h"

namespace poise {
namespace {

constexpr std::align_val_t kAlignment{256};

std::int64_t ns_for(double amount, double per_second) {
  return per_second > 0 ? static_cast<std::int64_t>(amount / per_second * 1e9) : 0;
}

// Operations of a launch, where they count: multiplications and additions of the two products.
double operations(const Gemm& op) {
  return 2.0 * static_cast<double>(op.rows) * op.weight.rows * op.weight.cols;
}
// Those of a row, and of each position for each head.
double operations(const AbsorbedAttention& op) {
  const Attention& attention = op.attention;
  const double row = 4.0 * attention.heads * attention.head_dim * op.w_kv.cols;
  return attention.sequence_count * row +
         4.0 * attention.heads * op.w_kv.cols * static_cast<double>(op.positions);
}
template <typename Op>
double operations(const Op&) {
  return 0;
}

// The first sample's logits hold a value that is not a number.
void spoil(const SampleTokens& op) {
  const std::int64_t first = std::int64_t{op.rows[0].row} * op.vocab_size;
  op.logits[first] = std::numeric_limits<float>::quiet_NaN();
}

std::function<void()> work_of(std::span<const Copy> copies) {
  return [pieces = std::vector(copies.begin(), copies.end())] {
    for (const Copy& one : pieces) {
      std::memcpy(one.to, one.from, static_cast<std::size_t>(one.bytes.n));
    }
  };
}

class Opened final : public CpuDevice {
 public:
  explicit Opened(const CpuDeviceOptions& options)
      : options_(options),
        memory_(options.memory.n > 0 ? options.memory : available_host_memory()),
        workers_(options.threads) {
    for (int i = 0; i < kDeviceStreams; ++i) {
      begin(static_cast<Stream>(i));
    }
  }

  ~Opened() override {
    for (auto& stream : streams_) {  // all of them first: they wait for one another
      if (stream) {
        stream->end_soon();
      }
    }
  }

  std::string name() const override {
    // Speeds that were set are part of it: what was measured at others does not hold.
    std::string name =
        fmt::format("cpu, {} thread{}", options_.threads, options_.threads == 1 ? "" : "s");
    if (options_.link_bytes_per_s > 0) {
      name += fmt::format(", a link of {:g} GB/s", options_.link_bytes_per_s * 1e-9);
    }
    if (options_.compute_flops > 0) {
      name += fmt::format(", {:g} GFLOP/s", options_.compute_flops * 1e-9);
    }
    if (options_.host_threads > 0) {
      name += fmt::format(", {} on host cores", counted(options_.host_threads, "thread"));
    }
    if (options_.host_bytes_per_s > 0) {
      name += fmt::format(", host cores of {:g} GB/s", options_.host_bytes_per_s * 1e-9);
    }
    return name;
  }
  DeviceKind kind() const override { return DeviceKind::cpu; }
  Bytes memory() const override { return memory_; }
  Bytes overhead() const override { return {0}; }
  DType work_type(DType) const override { return DType::float32; }
  bool reads_packed() const override { return !options_.unpacks_first; }
  int host_threads() const override {
    return options_.host_threads > 0 ? options_.host_threads : options_.threads;
  }
  double link_bytes_per_s() const override { return options_.link_bytes_per_s; }

  std::unique_ptr<Event> make_event() override { return std::make_unique<CpuEvent>(true); }
  std::unique_ptr<Event> make_signal() override { return std::make_unique<CpuEvent>(false); }

  void record(Event& event, Stream stream) override {
    stream_of(stream).record(static_cast<CpuEvent&>(event));
  }

  void wait(Stream stream, const Event& event) override {
    stream_of(stream).wait(static_cast<const CpuEvent&>(event));
  }
  void resume() override {}  // a stream's thread reads the time where it works

  bool reached(const Event& event, Seconds timeout) override {
    const auto record = static_cast<const CpuEvent&>(event).last;
    if (!record) {
      return true;
    }
    std::unique_lock lock(record->mutex);
    return record->changed.wait_for(lock, std::chrono::duration<double>(timeout.n),
                                    [&] { return record->reached; });
  }

  StreamTotals totals(const Event& event) override {
    CpuEvent::Record& record = told_by(event);
    const std::lock_guard lock(record.mutex);
    check(record.reached, "totals are asked of an event that was reached");
    return record.totals;
  }

  std::int64_t time_of(const Event& event) override {
    CpuEvent::Record& record = told_by(event);
    const std::lock_guard lock(record.mutex);
    check(record.reached, "the time is asked of an event that was reached");
    return std::chrono::nanoseconds(record.at - opened()).count();
  }

  void finish() override {
    release_streams();  // a pipeline that ends by an exception may leave them held
    for (auto& stream : streams_) {
      if (stream) {
        stream->finish();
      }
    }
  }

  void copy(Stream stream, std::span<const Copy> copies) override {
    push(stream, bytes_of(copies), work_of(copies));
  }

  void copy_here(Stream stream, std::span<const Copy> copies) override {
    stream_of(stream).push(work_of(copies), bytes_of(copies), 0);
  }

  void upload(Stream stream, std::span<const WeightCopy> weights) override {
    Bytes bytes{};
    for (const WeightCopy& one : weights) {
      bytes += one.bytes();
    }
    push(stream, bytes, [pieces = std::vector(weights.begin(), weights.end())] {
      for (const WeightCopy& one : pieces) {
        if (one.panelled) {
          cpu::pack_matrix(one.to, one.from, one.rows, one.cols, one.dtype);
        } else {
          std::memcpy(one.to, one.from, static_cast<std::size_t>(one.bytes().n));
        }
      }
    });
  }

  void launch(const EmbedTokens& op) override { compute(op, cpu::embed_tokens); }
  void launch(const AddPositions& op) override { compute(op, cpu::add_positions); }
  void launch(const LayerNorm& op) override { compute(op, cpu::layer_norm); }
  void launch(const RmsNorm& op) override { compute(op, cpu::rms_norm); }
  void launch(const Convert& op) override { compute(op, cpu::convert); }
  void launch(const GatedActivation& op) override { compute(op, cpu::gated_activation); }
  void launch(const Rotate& op) override { compute(op, cpu::rotate); }
  void launch(const Gemm& op) override { compute(op, cpu::gemm); }
  void launch(const QuantizeKv& op) override { compute(op, cpu::quantize_kv); }
  void launch(const Unpack& op) override { compute(op, cpu::unpack); }
  void launch(const ScatterRows& op) override { compute(op, cpu::scatter_rows); }
  void launch(const Attention& op) override { compute(op, cpu::attention); }
  void launch(const AbsorbedAttention& op) override { compute(op, cpu::absorbed_attention); }
  void launch(const HostAttention& op) override {
    stream_of(Stream::host)
        .push(
            [this, op] {
              if (!host_workers_) {
                host_workers_.emplace(host_threads());
              }
              host::host_attention(op, *host_workers_);
            },
            {op.bytes}, ns_for(static_cast<double>(op.bytes), options_.host_bytes_per_s));
  }
  void launch(const SampleTokens& op) override {
    if (failpoint("device.logits").kind == Fault::Kind::nan) {
      stream_of(Stream::compute).push([op] { spoil(op); }, {0}, 0);
    }
    compute(op, cpu::sample_tokens);
  }

  std::optional<std::string> failure() override { return trouble_.take_sentence(); }

  void hold() override {
    check(!options_.synchronous, "a device that is held has threads");
    held_ = true;
    for (auto& stream : streams_) {
      if (stream) {
        stream->hold();
      }
    }
  }
  void release_streams() override {
    held_ = false;
    for (auto& stream : streams_) {
      if (stream) {
        stream->release();
      }
    }
  }

 protected:
  std::byte* take(Bytes size) override {
    if (size > memory_ - in_use()) {
      return nullptr;
    }
    std::byte* data = take_host(size);
    if (data != nullptr && options_.poison) {
      std::memset(data, 0xff, static_cast<std::size_t>(size.n));
    }
    return data;
  }
  void give(std::byte* data, Bytes size) override { give_host(data, size); }
  std::byte* take_host(Bytes size) override {
    return static_cast<std::byte*>(
        ::operator new(static_cast<std::size_t>(size.n), kAlignment, std::nothrow));
  }
  void give_host(std::byte* data, Bytes) override { ::operator delete(data, kAlignment); }
  // A thread reaches any page.
  void pin(std::span<const std::span<std::byte>>, bool) override {}
  void unpin(std::span<const std::span<std::byte>>) override {}

 private:
  static CpuEvent::Record& told_by(const Event& event) {
    const auto& asked = static_cast<const CpuEvent&>(event);
    check(asked.timed, "totals and times are asked of an event that tells them");
    check(asked.last != nullptr, "totals and times are asked of an event that was recorded");
    return *asked.last;
  }

  double speed_of(Stream stream) const {
    switch (stream) {
      case Stream::compute:
        return options_.compute_flops;
      case Stream::host:
        return options_.host_bytes_per_s;
      default:
        return options_.link_bytes_per_s;
    }
  }

  void begin(Stream stream) {
    static constexpr std::array<const char*, kStreams> kNames{"copy_in", "compute", "copy_out",
                                                              "host"};
    const auto i = static_cast<std::size_t>(stream);
    const auto seed =
        options_.jitter ? std::optional(*options_.jitter * kStreams + i) : std::nullopt;
    streams_[i] = std::make_unique<CpuStream>(kNames[i], trouble_, speed_of(stream) > 0, seed,
                                              options_.synchronous);
    if (held_) {
      streams_[i]->hold();
    }
  }

  CpuStream& stream_of(Stream stream) {
    auto& there = streams_[static_cast<std::size_t>(stream)];
    if (!there) {
      begin(stream);
    }
    return *there;
  }

  void push(Stream stream, Bytes copied, std::function<void()> work) {
    stream_of(stream).push(std::move(work), copied,
                           ns_for(static_cast<double>(copied.n), options_.link_bytes_per_s));
  }

  template <typename Op>
  void compute(const Op& op, void (*kernel)(const Op&, cpu::Workers&)) {
    stream_of(Stream::compute)
        .push([this, op, kernel] { kernel(op, workers_); }, {0},
              ns_for(operations(op), options_.compute_flops));
  }

  const CpuDeviceOptions options_;
  const Bytes memory_;
  cpu::Workers workers_;                      // where the compute stream's tasks are done
  std::optional<cpu::Workers> host_workers_;  // where the host stream's tasks are done
  bool held_ = false;
  Trouble trouble_;
  std::array<std::unique_ptr<CpuStream>, kStreams> streams_;
};

}  // namespace

std::unique_ptr<CpuDevice> open_cpu_device(const CpuDeviceOptions& options) {
  if (options.threads < 1 || options.threads > 256) {
    fail("--threads is {}: it must be 1 to 256", options.threads);
  }
  if (options.host_threads < 0 || options.host_threads > 256) {
    fail("--host-threads is {}: it must be 1 to 256", options.host_threads);
  }
  return std::make_unique<Opened>(options);
}

}  // namespace poise
