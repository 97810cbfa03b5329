#include "gpu_executor/host_memory.h"

#include <fmt/core.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/standing_ends.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

LoaderState state_of(const ControlSegment& control) {
  return static_cast<LoaderState>(control.loader_state.load(std::memory_order_acquire));
}

// How far from their ends of a region the blocks of the host reach that an iteration names.
std::uint64_t bytes_from_end(const messages::Iteration& iteration, const BlockSizes& sizes) {
  std::uint64_t farthest = 0;
  const auto reach = [&](messages::Kind kind, messages::Place place, std::uint64_t blocks) {
    if (place == messages::Place::Host) {
      const BlockKind own = kind == messages::Kind::Kv ? BlockKind::kv : BlockKind::act;
      farthest = std::max(farthest, blocks * static_cast<std::uint64_t>(sizes.block(own).n));
    }
  };
  // Not checked yet: any of these may be absent.
  const auto each = [](const auto* vector, const auto& act) {
    if (vector != nullptr) {
      std::for_each(vector->begin(), vector->end(), act);
    }
  };
  each(iteration.mini_batches(), [&](const messages::MiniBatch* batch) {
    each(batch->loads(), [&](const messages::BlockRun* run) {
      reach(run->kind(), run->place(), std::uint64_t{run->first_block()} + run->count());
    });
    each(batch->stores(), [&](const messages::Store* store) {
      reach(store->kind(), store->place(), std::uint64_t{store->block()} + 1);
    });
    each(batch->entries(), [&](const messages::AttentionEntry* entry) {
      if (entry->where() == messages::Where::HostInPlace) {
        reach(entry->kind(), messages::Place::Host, std::uint64_t{entry->block()} + 1);
      }
    });
  });
  return farthest;
}

}  // namespace

HostMemory::HostMemory(const std::string& run_id, Device& device)
    : run_id_(run_id),
      device_(device),
      control_(Control::attach(run_id)),
      publisher_(control_->progress[static_cast<int>(Process::gpu_executor)]) {}

bool HostMemory::weights_ready() {
  if (model_) {
    return true;
  }
  switch (state_of(*control_)) {
    case LoaderState::creating:
    case LoaderState::loading:
      return false;
    case LoaderState::draining:
      fail(Exit::interrupted, "the loader ends before the weights are there");
    case LoaderState::sealed:
      map_weights();
      return true;
  }
  fail(Exit::foreign, "the control segment has loader state {}, which is none",
       control_->loader_state.load());
}

void HostMemory::map_weights() {
  SharedModel model = model_in(*control_);
  weights_ = Segment::attach(segment_name(run_id_, "weights"), Access::read_only);
  if (weights_->size() < model.layout.total()) {
    fail(Exit::foreign, "shared memory {} has {} bytes, the model's weights take {}",
         weights_->name(), weights_->size().n, model.layout.total().n);
  }
  weights_registrations_.resize(static_cast<std::size_t>(model.layout.layers) + 1);
  model_ = Model{.shape = model.shape,
                 .dtype = model.dtype,
                 .layout = std::move(model.layout),
                 .weights = all_of(*weights_)};
  failpoint("executor.attached");
}

void HostMemory::check_held(const std::vector<bool>& slabs) const {
  const DeviceLimits released{.resident_layers = static_cast<std::int32_t>(
                                  control_->released_layers.load(std::memory_order_acquire))};
  for (std::uint32_t layer = 0; layer + 1 < slabs.size(); ++layer) {
    if (slabs[layer + 1] && is_resident(released, {layer}, model_->layout.layers)) {
      fail(
          "the weights of layer {} are not in host memory any more: the loader released those of "
          "{} layers",
          layer, released.resident_layers);
    }
  }
}

void HostMemory::register_weights(const std::vector<bool>& slabs) {
  check(slabs.size() == weights_registrations_.size(), "a word for each slab");
  const WeightLayout& layout = model_->layout;
  std::vector<std::size_t> wanted;
  std::vector<std::span<std::byte>> parts;
  for (std::size_t slab = 0; slab < slabs.size(); ++slab) {
    if (!slabs[slab]) {
      weights_registrations_[slab].reset();
    } else if (!weights_registrations_[slab]) {
      wanted.push_back(slab);
      const std::size_t begin =
          slab > 0 ? layout.layer_offset({static_cast<std::uint32_t>(slab - 1)}) : 0;
      const Bytes bytes = slab > 0 ? layout.layer.bytes : layout.outer.bytes;
      parts.push_back(all_of(*weights_).subspan(begin, static_cast<std::size_t>(bytes.n)));
    }
  }
  if (!wanted.empty()) {
    std::vector<Registration> made = device_.register_host(parts, true);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      weights_registrations_[wanted[i]] = std::move(made[i]);
    }
  }
}

std::vector<std::uint8_t> HostMemory::fingerprint() const {
  if (control_->fingerprint_ready.load(std::memory_order_acquire) == 0) {
    return {};
  }
  return {std::begin(control_->fingerprint), std::end(control_->fingerprint)};
}

PoolNow HostMemory::pool() const {
  PoolNow now;
  now.epoch = control_->pool_epoch.load(std::memory_order_acquire);
  now.partition = control_->pool;
  now.kv_format = control_->kv_format;
  if (control_->pool_epoch.load(std::memory_order_acquire) != now.epoch) {
    return {};  // it is being remade: no pool for now
  }
  return now;
}

HostMemory::~HostMemory() { device_.end(std::move(blocks_registrations_)); }

void HostMemory::unmap_blocks() {
  if (blocks_) {
    device_.end(std::exchange(blocks_registrations_, {}));
    device_.expect_registered({});
    blocks_.reset();
    spdlog::info("unmapped block pool {}", blocks_epoch_);
  }
}

void HostMemory::map_blocks(const PoolNow& pool) {
  unmap_blocks();
  blocks_ = Segment::attach(segment_name(run_id_, fmt::format("blocks-{}", pool.epoch)),
                            Access::read_write);
  blocks_epoch_ = pool.epoch;
  region_bytes_ = pool.partition.region_bytes;
  registered_ = 0;
  spdlog::info("mapped block pool {}: {} bytes", pool.epoch, blocks_->size().n);
  device_.expect_registered(blocks_->size());
  register_standing();
}

void HostMemory::register_standing() {
  if (!blocks_ || registered_ >= region_bytes_) {
    return;
  }
  const auto layers = static_cast<std::uint64_t>(model_->shape.num_hidden_layers);
  const auto size = static_cast<std::uint64_t>(blocks_->size().n);
  // `blocks` refuses a header that contradicts the segment.
  const bool sound = size / layers == region_bytes_ && size % layers == 0;
  const std::uint64_t standing =
      sound ? control_->pool_standing.load(std::memory_order_acquire) : region_bytes_;
  const StandingEnds before = standing_ends(region_bytes_, registered_);
  const StandingEnds now = standing_ends(region_bytes_, standing);
  const std::span<std::byte> all = all_of(*blocks_);
  std::vector<std::span<std::byte>> parts;
  if (!sound || (registered_ == 0 && now.low == now.high)) {
    parts.push_back(all);
  } else {
    for (std::uint64_t layer = 0; layer < layers; ++layer) {
      const auto add = [&](std::uint64_t begin, std::uint64_t end) {
        if (begin < end) {
          parts.push_back(all.subspan(layer * region_bytes_ + begin, end - begin));
        }
      };
      if (now.low == now.high) {
        add(before.low, before.high);
      } else {
        add(before.low, now.low);
        add(now.high, before.high);
      }
    }
  }
  if (parts.empty()) {
    return;
  }
  std::vector<Registration> made = device_.register_host(parts, false);
  std::ranges::move(made, std::back_inserter(blocks_registrations_));
  registered_ = !sound || now.low == now.high ? region_bytes_ : standing;
  device_.expect_registered(
      sound ? Bytes{static_cast<std::int64_t>(now.high - now.low)} * model_->shape.num_hidden_layers
            : Bytes{});
}

bool HostMemory::stands(const messages::Iteration& iteration) const {
  const PoolNow now = pool();
  const std::uint64_t standing = control_->pool_standing.load(std::memory_order_acquire);
  if (now.epoch == 0 || iteration.pool_epoch() != now.epoch || now.kv_format > KvFormat::int4 ||
      standing >= now.partition.region_bytes) {
    return true;
  }
  const BlockSizes sizes = block_sizes(model_->shape, model_->dtype, now.kv_format);
  if (std::min(bytes_from_end(iteration, sizes), now.partition.region_bytes) <= standing) {
    return true;
  }
  if (state_of(*control_) == LoaderState::draining) {
    fail(Exit::interrupted, "the loader ends before the block pool's memory is there");
  }
  return false;
}

HostBlocks HostMemory::blocks(const PoolNow& pool) const {
  check(mapped(pool), "blocks are used while they are mapped");
  if (pool.kv_format > KvFormat::int4) {
    fail("the pool in the control segment has KV blocks of format {}, which is none",
         static_cast<std::uint32_t>(pool.kv_format));
  }
  check_pool(pool.partition, block_sizes(model_->shape, model_->dtype, pool.kv_format),
             model_->shape.num_hidden_layers, blocks_->size());
  return {.data = blocks_->data(), .partition = pool.partition};
}

void HostMemory::progress() {
  control_->progress[static_cast<int>(Process::gpu_executor)].steps.fetch_add(
      1, std::memory_order_relaxed);
}

std::span<std::byte> HostMemory::all_of(const Segment& segment) const {
  return {segment.data(), static_cast<std::size_t>(segment.size().n)};
}

}  // namespace poise
