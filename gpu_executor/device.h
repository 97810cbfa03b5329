#pragma once
// All the pipeline asks of a device: memory, its streams, events, batched copies, and one launch
// for each operation of kernels/kernels.h. Nothing of CUDA or of the CPU device shows here.
//
// A stream runs what it was given in order, by itself; streams wait for one another only through
// events. Calls return at once (they may wait for room in a stream's queue) and what they point to,
// tables excepted, must stay until the stream is past it. After an error on a stream nothing runs any
// more, all events complete, and `failure` returns the error once. One thread uses a device
// and all that came from it.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/device_kind.h"
#include "common/units.h"
#include "kernels/host/host_attention.h"
#include "kernels/kernels.h"

namespace poise {

// `host`: the host cores as a third resource beside link and device; only where host_threads() > 0.
enum class Stream : std::uint8_t { copy_in = 0, compute = 1, copy_out = 2, host = 3 };
inline constexpr int kStreams = 4;
inline constexpr Stream kAllStreams[kStreams] = {Stream::copy_in, Stream::compute, Stream::copy_out,
                                                 Stream::host};
inline constexpr int kDeviceStreams = 3;  // those before `host`

// One piece of a batched copy, in either direction.
struct Copy {
  void* to;
  const void* from;
  Bytes bytes;
};
Bytes bytes_of(std::span<const Copy> copies);  // of all of them

// A weight on its way to the device: a matrix (rows, cols) row-major at `from`, which the device
// may keep in another layout at `to` (padded to 16 rows, common/device_memory.h), or plain bytes.
struct WeightCopy {
  void* to;
  const void* from;
  std::int32_t rows, cols;
  DType dtype;
  bool panelled;       // false: a plain copy
  Bytes plain_size{};  // of a plain copy that is not of (rows, cols) numbers: packed, or a table

  Bytes bytes() const { return plain_size.n > 0 ? plain_size : size_of(dtype) * rows * cols; }
};

// What a stream did since the device was opened.
struct StreamTotals {
  std::int64_t bytes = 0;    // copied
  std::int64_t busy_ns = 0;  // at work
  std::int64_t wait_ns = 0;  // stood waiting for another stream
};

// A point in a stream. It may be recorded again, and then means the last record. An event that was never
// recorded counts as reached.
class Event {
 public:
  virtual ~Event() = default;
};

class Device;

// Bytes held by one owner, given back to their device at its end. The device must outlive them.
enum class Memory : std::uint8_t { device, host, registered };
template <Memory kind>
class Held {
 public:
  Held() = default;
  Held(Device& device, std::byte* data, Bytes size) : device_(&device), data_(data), size_(size) {}
  Held(Held&& other) noexcept { swap(other); }
  Held& operator=(Held&& other) noexcept {
    Held(std::move(other)).swap(*this);
    return *this;
  }
  ~Held();

  void forget() { data_ = nullptr; }  // the device has taken it back
  std::byte* data() const { return data_; }
  Bytes size() const { return size_; }

 private:
  void swap(Held& other) {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  Bytes size_{};
};
using Buffer = Held<Memory::device>;
using HostBuffer = Held<Memory::host>;
using Registration = Held<Memory::registered>;

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cpu, 2 threads", "cuda: NVIDIA H200"
  virtual DeviceKind kind() const = 0;
  virtual Bytes memory() const = 0;    // all it could use
  virtual Bytes overhead() const = 0;  // of it, taken beside our buffers: context, workspaces
  // How numbers are kept between operations where kernels.h leaves it open (Rows), for a model
  // stored as `stored`. Never wider than float32.
  virtual DType work_type(DType stored) const = 0;
  // Whether a Gemm reads packed weights; if not, the pipeline launches an Unpack before it.
  virtual bool reads_packed() const { return false; }
  // Threads that attend on host cores, on a stream of their own; 0: there is no such stream.
  virtual int host_threads() const { return 0; }
  // What the link carries from host to device at most, measured or set; 0: not known.
  virtual double link_bytes_per_s() const { return 0; }
  // When the device's clock (`time_of`) stood at 0.
  std::chrono::steady_clock::time_point opened() const { return opened_; }

  // Memory on the device, aligned to 256 bytes and counted. Fails, with numbers, beyond the cap.
  Buffer allocate(Bytes size, std::string_view what);
  void set_cap(Bytes cap) { cap_ = cap; }  // of `in_use`, overhead included
  Bytes cap() const { return cap_; }
  Bytes in_use() const { return in_use_; }
  Bytes peak() const { return peak_; }

  // Host memory that copies reach at full speed: of our own (for tables and results) …
  HostBuffer allocate_host(Bytes size);
  Bytes host_in_use() const { return host_in_use_; }
  // … or a shared mapping that another process owns, which must stay mapped until the registration ends. That
  // may take its time behind the caller: a call of `copy` or `upload` then waits for the bytes it is
  // given, and fails where they cannot be had.
  Registration register_host(std::span<std::byte> memory, bool read_only);
  // Several, each of which may end by itself.
  std::vector<Registration> register_host(std::span<const std::span<std::byte>> parts,
                                          bool read_only);

  // Ends several at once, which is faster on a GPU than one by one.
  void end(std::vector<Registration> registrations);
  // So much more will be registered: what that takes of the device's memory counts from now on.
  virtual void expect_registered(Bytes /*more*/) {}

  virtual std::unique_ptr<Event> make_event() = 0;
  // For waiting alone: it has neither totals nor a time, which makes it cheaper on a GPU.
  virtual std::unique_ptr<Event> make_signal() = 0;
  virtual void record(Event& event, Stream stream) = 0;
  virtual void wait(Stream stream, const Event& event) = 0;  // the stream waits, not the caller
  // New work begins: where a stream has done all that it was given, the time since then was neither
  // work nor waiting for another stream.
  virtual void resume() = 0;
  // The caller waits; true where the stream passed the event within `timeout`.
  virtual bool reached(const Event& event, Seconds timeout = {0}) = 0;
  // What the stream had done when it passed the event. REQUIRES: recorded and reached, no signal.
  virtual StreamTotals totals(const Event& event) = 0;
  // When that was, in ns of the device's clock. REQUIRES: recorded and reached, no signal.
  virtual std::int64_t time_of(const Event& event) = 0;
  virtual void finish() = 0;  // the caller waits until all streams have nothing left to do

  // On the compute stream: a few rows of memory from allocate_host, which do not wait for loads on other streams.
  virtual void copy(Stream stream, std::span<const Copy> copies) = 0;
  // Within the device's memory: nothing crosses the link. Pieces do not overlap.
  virtual void copy_here(Stream stream, std::span<const Copy> copies) = 0;
  virtual void upload(Stream stream, std::span<const WeightCopy> weights) = 0;

  // On the compute stream. The structs are copied; what they point to is on the device.
  virtual void launch(const EmbedTokens& op) = 0;
  virtual void launch(const AddPositions& op) = 0;
  virtual void launch(const LayerNorm& op) = 0;
  virtual void launch(const RmsNorm& op) = 0;
  virtual void launch(const Convert& op) = 0;
  virtual void launch(const GatedActivation& op) = 0;
  virtual void launch(const Rotate& op) = 0;
  virtual void launch(const Gemm& op) = 0;
  virtual void launch(const QuantizeKv& op) = 0;
  virtual void launch(const Unpack& op) = 0;
  virtual void launch(const ScatterRows& op) = 0;
  virtual void launch(const Attention& op) = 0;
  virtual void launch(const AbsorbedAttention& op) = 0;
  virtual void launch(const SampleTokens& op) = 0;

  // On the host stream. What its tables and operands point to is host memory, and stays until the stream
  // is past it. REQUIRES: host_threads() > 0.
  virtual void launch(const HostAttention& op);

  // Names what is queued between the two, for a profiler that watches (NVTX). They nest.
  virtual void range_push(const char* /*name*/) {}
  virtual void range_pop() {}

  // The first thing that went wrong on a stream, as a sentence; once.
  virtual std::optional<std::string> failure() = 0;

 protected:
  virtual std::byte* take(Bytes size) = 0;  // null where there is no room
  virtual void give(std::byte* data, Bytes size) = 0;
  virtual std::byte* take_host(Bytes size) = 0;
  virtual void give_host(std::byte* data, Bytes size) = 0;
  virtual void pin(std::span<const std::span<std::byte>> parts, bool read_only) = 0;
  virtual void unpin(std::span<const std::span<std::byte>> parts) = 0;
  // The device's clock begins; without it, when this object was made.
  void clock_begins() { opened_ = std::chrono::steady_clock::now(); }

 private:
  template <Memory kind>
  friend class Held;
  void release(Memory kind, std::byte* data, Bytes size);

  Bytes cap_{INT64_MAX};
  Bytes in_use_{}, peak_{}, host_in_use_{};
  std::chrono::steady_clock::time_point opened_ = std::chrono::steady_clock::now();
};

template <Memory kind>
Held<kind>::~Held() {
  if (data_ != nullptr) {
    device_->release(kind, data_, size_);
  }
}

}  // namespace poise
