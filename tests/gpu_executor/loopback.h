#pragma once
// The two peers of an executor inside one process: a loader's segments, made by hand, and a channel
// that is two queues. Segments are unlinked at the end.

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/channel.h"
#include "common/shared_memory.h"
#include "tests/gpu_executor/tiny_model.h"

namespace poise::test {

class HandmadeLoader {
 public:
  explicit HandmadeLoader(const TinyModel& model)
      : run_id(fmt::format("e{:x}x{}", getpid(), next_++)),
        sizes_(block_sizes(model.shape, model.dtype, KvFormat::plain)),
        layers_(model.shape.num_hidden_layers),
        control_(Control::create(run_id, model.layout.hash())),
        weights_(Segment::create(segment_name(run_id, "weights"), model.layout.total())) {
    control_->shape = model.shape;
    control_->dtype = model.dtype;
    control_->weights_bytes = static_cast<std::uint64_t>(model.layout.total().n);
    control_->loader_state.store(static_cast<std::uint32_t>(LoaderState::loading));
    std::memcpy(weights_.data(), model.bytes.data(), model.bytes.size());
  }
  ~HandmadeLoader() {
    for (const std::string& name : names_) {
      unlink_segment(name);
    }
    unlink_segment(weights_.name());
    unlink_segment(control_.segment().name());
  }
  HandmadeLoader(const HandmadeLoader&) = delete;
  HandmadeLoader& operator=(const HandmadeLoader&) = delete;

  void seal() {
    weights_.seal();
    control_->loader_state.store(static_cast<std::uint32_t>(LoaderState::sealed));
  }

  // Gives back the memory of the layers that a device holds.
  void release_layers(std::int32_t resident_layers, const WeightLayout& layout) {
    control_->released_layers.store(static_cast<std::uint32_t>(resident_layers));
    for (std::uint32_t layer = 0; layer < static_cast<std::uint32_t>(layers_); ++layer) {
      if (is_resident({.resident_layers = resident_layers}, {layer}, layers_)) {
        weights_.give_back(layout.layer_offset({layer}), layout.layer.bytes);
      }
    }
  }

  // A pool of a new epoch.
  PoolPartition make_pool(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
    const std::int64_t bytes =
        sizes_.block(BlockKind::act).n * act_blocks + sizes_.block(BlockKind::kv).n * kv_blocks;
    const PoolPartition pool{.region_bytes = static_cast<std::uint64_t>(round_up(bytes, 4096)),
                             .act_blocks = act_blocks,
                             .kv_blocks = kv_blocks};
    const std::uint64_t epoch = names_.size() + 1;
    names_.push_back(segment_name(run_id, fmt::format("blocks-{}", epoch)));
    blocks_ =
        Segment::create(names_.back(), {static_cast<std::int64_t>(pool.region_bytes) * layers_});
    control_->pool = pool;
    control_->pool_standing = pool.region_bytes;
    control_->pool_epoch.store(epoch, std::memory_order_release);
    return pool;
  }

  // As a loader that gives the pool up: whether nobody maps it any more.
  void give_up_pool() { control_->pool_epoch.store(0, std::memory_order_release); }
  bool pool_is_unused() const { return blocks_->is_ours_alone(); }

  std::span<const std::byte> blocks() const {
    return {blocks_->data(), static_cast<std::size_t>(blocks_->size().n)};
  }
  ControlSegment& control() { return *control_; }

  const std::string run_id;

 private:
  static inline std::atomic<int> next_{0};
  const BlockSizes sizes_;
  const std::int64_t layers_;
  Control control_;
  Segment weights_;
  std::optional<Segment> blocks_;
  std::vector<std::string> names_;
};

// What both ends of the loopback hold.
struct Wires {
  std::deque<Received> to_executor;
  std::deque<messages::MessageT> to_planner;
  bool connected = true;
  std::uint64_t seq = 0;  // of the planner's messages
  std::uint64_t connections = 1;
  std::function<void()> meanwhile;  // what others do while the executor waits for a message

  // Sends one of a planner's tables; returns its number.
  template <typename Table>
  std::uint64_t send(const Table& table, std::uint32_t planner_epoch = 1) {
    messages::MessageT message;
    message.seq = ++seq;
    message.planner_epoch = planner_epoch;
    message.run_id = "loopback";
    Table copy = table;
    message.body.Set(std::move(copy));
    flatbuffers::FlatBufferBuilder builder;
    messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
    const auto* bytes = reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
    to_executor.emplace_back(std::vector<std::byte>(bytes, bytes + builder.GetSize()));
    return seq;
  }

  std::optional<messages::MessageT> take() {
    if (to_planner.empty()) {
      return std::nullopt;
    }
    messages::MessageT message = std::move(to_planner.front());
    to_planner.pop_front();
    return message;
  }
};

class Loopback final : public Channel {
 public:
  explicit Loopback(std::shared_ptr<Wires> wires) : wires_(std::move(wires)) {}

  bool send(messages::BodyUnion body, std::vector<std::byte>*) override {
    if (!wires_->connected) {
      return false;
    }
    messages::MessageT& message = wires_->to_planner.emplace_back();
    message.executor_epoch = epochs_.executor;
    message.body = std::move(body);
    return true;
  }
  std::optional<Received> receive(Seconds) override {
    if (wires_->meanwhile) {
      wires_->meanwhile();
    }
    if (wires_->to_executor.empty()) {
      return std::nullopt;
    }
    Received message = std::move(wires_->to_executor.front());
    wires_->to_executor.pop_front();
    return message;
  }
  bool connected() const override { return wires_->connected; }
  std::uint64_t connections() const override { return wires_->connections; }
  void set_epochs(Epochs epochs) override { epochs_ = epochs; }
  Epochs epochs() const override { return epochs_; }

 private:
  std::shared_ptr<Wires> wires_;
  Epochs epochs_;
};

}  // namespace poise::test
