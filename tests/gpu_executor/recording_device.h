#pragma once
// A device that runs nothing and remembers what was queued: each call is a piece of work that comes
// behind the one before it on its stream and behind the events its stream was told to wait for. What
// must precede what can then be read off, whatever a machine would make of it. Ranges of a traced
// pipeline name the work.

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "common/trouble.h"
#include "gpu_executor/device.h"

namespace poise::test {

struct Queued {
  std::string range;    // "KvGen 0"; empty: between ranges
  std::uint32_t order;  // as the test counts them
  std::vector<Copy> copies;
  std::vector<WeightCopy> uploads;
  std::vector<std::size_t> behind;  // what it follows directly
};

class RecordingDevice : public Device {
 public:
  std::uint32_t order = 0;  // that is being queued
  bool is_broken = false;   // as a GPU after an error: each later call fails

  const std::vector<Queued>& queued() const { return queued_; }

  // All that is over when `work` begins.
  std::vector<std::size_t> before(std::size_t work) const {
    std::vector<bool> seen(work + 1);
    std::vector<std::size_t> open{work}, found;
    while (!open.empty()) {
      const std::size_t next = open.back();
      open.pop_back();
      for (const std::size_t one : queued_[next].behind) {
        if (!seen[one]) {
          seen[one] = true;
          open.push_back(one);
          found.push_back(one);
        }
      }
    }
    return found;
  }

  std::string name() const override { return "recording"; }
  DeviceKind kind() const override { return DeviceKind::cpu; }
  Bytes memory() const override { return kMiB * 64; }
  Bytes overhead() const override { return {}; }
  DType work_type(DType) const override { return DType::float32; }
  std::unique_ptr<Event> make_event() override { return std::make_unique<Mark>(); }
  std::unique_ptr<Event> make_signal() override { return std::make_unique<Mark>(); }
  void record(Event& event, Stream stream) override {
    static_cast<Mark&>(event).behind = pending(stream);
  }
  void wait(Stream stream, const Event& event) override {
    const auto& behind = static_cast<const Mark&>(event).behind;
    auto& own = pending(stream);
    own.insert(own.end(), behind.begin(), behind.end());
  }
  void resume() override {}
  bool reached(const Event&, Seconds) override { return true; }
  StreamTotals totals(const Event&) override { return {}; }
  std::int64_t time_of(const Event&) override { return 0; }
  void finish() override {
    if (is_broken) {
      throw Failure("the device is broken", Exit::device_failed);
    }
  }
  std::optional<std::string> failure() override { return std::nullopt; }

  void copy(Stream stream, std::span<const Copy> copies) override {
    add(stream).copies.assign(copies.begin(), copies.end());
  }
  void copy_here(Stream stream, std::span<const Copy> copies) override { copy(stream, copies); }
  void upload(Stream stream, std::span<const WeightCopy> weights) override {
    add(stream).uploads.assign(weights.begin(), weights.end());
  }
  void launch(const EmbedTokens&) override { add(Stream::compute); }
  void launch(const AddPositions&) override { add(Stream::compute); }
  void launch(const LayerNorm&) override { add(Stream::compute); }
  void launch(const RmsNorm&) override { add(Stream::compute); }
  void launch(const Convert&) override { add(Stream::compute); }
  void launch(const GatedActivation&) override { add(Stream::compute); }
  void launch(const Rotate&) override { add(Stream::compute); }
  void launch(const Gemm&) override { add(Stream::compute); }
  void launch(const QuantizeKv&) override { add(Stream::compute); }
  void launch(const Unpack&) override { add(Stream::compute); }
  void launch(const ScatterRows&) override { add(Stream::compute); }
  void launch(const Attention&) override { add(Stream::compute); }
  void launch(const SampleTokens&) override { add(Stream::compute); }
  void launch(const AbsorbedAttention&) override { add(Stream::compute); }
  void range_push(const char* range) override { range_ = range; }
  void range_pop() override { range_.clear(); }

 protected:
  std::byte* take(Bytes size) override {
    auto* data = static_cast<std::byte*>(
        ::operator new(static_cast<std::size_t>(size.n) + 1, std::align_val_t{256}));
    std::memset(data, 0, static_cast<std::size_t>(size.n));
    return data;
  }
  void give(std::byte* data, Bytes) override { ::operator delete(data, std::align_val_t{256}); }
  std::byte* take_host(Bytes size) override { return take(size); }
  void give_host(std::byte* data, Bytes size) override { give(data, size); }
  void pin(std::span<const std::span<std::byte>>, bool) override {}
  void unpin(std::span<const std::span<std::byte>>) override {}

 private:
  struct Mark final : Event {
    std::vector<std::size_t> behind;
  };

  // What the stream's next piece of work follows.
  std::vector<std::size_t>& pending(Stream stream) {
    return pending_[static_cast<std::size_t>(stream)];
  }
  Queued& add(Stream stream) {
    queued_.push_back({.range = range_,
                       .order = order,
                       .copies = {},
                       .uploads = {},
                       .behind = std::exchange(pending(stream), {queued_.size()})});
    return queued_.back();
  }

  std::vector<Queued> queued_;
  std::array<std::vector<std::size_t>, kStreams> pending_;
  std::string range_;
};

}  // namespace poise::test
