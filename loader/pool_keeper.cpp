#include "loader/pool_keeper.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "common/standing_ends.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

messages::PoolGrantT refusal(std::string sentence) {
  spdlog::warn("a block pool was refused: {}", sentence);
  messages::PoolGrantT grant;
  grant.granted = false;
  grant.sentence = std::move(sentence);
  return grant;
}

}  // namespace

PoolKeeper::PoolKeeper(Control& control, const HostBudget& budget, std::function<Bytes()> available)
    : control_(control),
      budget_(budget),
      available_(std::move(available)),
      layers_(control->shape.num_hidden_layers) {}

PoolKeeper::~PoolKeeper() {
  stop_growing();
  stop_ = true;
  if (coming_.valid()) {
    coming_.wait();
  }
}

void PoolKeeper::adopt() {
  const std::uint64_t epoch = control_->pool_epoch.load(std::memory_order_acquire);
  // Also one that a loader was about to make over.
  const std::uint64_t newest = control_->newest_pool_epoch;
  for (std::uint64_t other = newest; other > epoch && other + 2 > newest; --other) {
    unlink_segment(name_of(other));
  }
  control_->spare_pool_bytes.store(0, std::memory_order_release);
  if (epoch != 0) {
    blocks_ = std::make_unique<BlocksSegment>(name_of(epoch));
    begin_growing();  // where the ended loader was
  }
}

void PoolKeeper::leave() {
  check(!busy(), "a pool that is being made is not left to a successor");
  stop_growing();
  if (blocks_) {
    blocks_->leave();
  }
}

void PoolKeeper::unlink() {
  if (blocks_ || spare_) {
    unlink_segment(name_of(control_->newest_pool_epoch));
  }
}

std::string PoolKeeper::name_of(std::uint64_t epoch) const {
  return segment_name(control_.run_id(), fmt::format("blocks-{}", epoch));
}

BlockSizes PoolKeeper::sizes(KvFormat format) const {
  return block_sizes(control_->shape, control_->dtype, format);
}

void PoolKeeper::claim(const PoolWish& wish, std::optional<Bytes> host_memory) {
  claimed_ = wish;
  asked_ = host_memory;
  if (coming_.valid()) {
    wanted_ = false;
    stop_ = true;
  }
}

void PoolKeeper::forget_claim() {
  claimed_.reset();
  if (coming_.valid()) {
    wanted_ = false;
    stop_ = true;
  }
}

std::optional<messages::PoolGrantT> PoolKeeper::advance() {
  if (growing_.valid() &&
      growing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    try {
      growing_.get();
      spdlog::info("block pool {}: all of its memory stands, {} of it new in huge pages",
                   control_->newest_pool_epoch, gib_text(blocks_ ? blocks_->huge() : Bytes{}));
    } catch (const Failure& failure) {
      fail(Exit::interrupted, "the memory of the block pool cannot be had any more: {}",
           failure.what());
    }
  }
  if (coming_.valid()) {
    if (coming_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      return std::nullopt;
    }
    if (wanted_) {
      return finish();
    }
    try {
      coming_.get();  // and release it
    } catch (const Failure& failure) {
      spdlog::warn("a block pool, whose planner is gone, was not made: {}", failure.what());
    }
  }
  return claimed_ ? begin() : std::nullopt;
}

std::optional<messages::PoolGrantT> PoolKeeper::begin() {
  making_ = *std::exchange(claimed_, std::nullopt);
  give_up();
  if (making_.kv_format > KvFormat::int4) {
    return refusal(fmt::format("KV blocks of format {}: there is no such format",
                               static_cast<std::uint32_t>(making_.kv_format)));
  }
  const PoolPartition& partition = making_.partition;
  if (const auto reason = why_no_partition(partition, sizes(making_.kv_format), layers_)) {
    return refusal(*reason);
  }
  const Bytes size{static_cast<std::int64_t>(partition.region_bytes) * layers_};
  look_at_spare();
  if (spare_ && control_->spare_pool_bytes.load(std::memory_order_relaxed) == 0) {
    drop_spare();
  }
  const Bytes available = available_() + (spare_ ? spare_->size() : Bytes{0});
  const HostBudget budget = asked_ ? host_budget(asked_, weights() + available) : budget_;
  if (const auto reason = why_no_pool(size, weights(), budget, available)) {
    return refusal(*reason);
  }
  ++control_->newest_pool_epoch;
  stop_ = false;
  wanted_ = true;
  control_->spare_pool_bytes.store(0, std::memory_order_release);
  making_.stands = spare_ != nullptr && spare_->size() >= size;
  coming_ = std::async(std::launch::async, [this, size, spare = std::move(spare_)]() mutable {
    const std::string name = name_of(control_->newest_pool_epoch);
    if (!spare) {
      return std::make_unique<BlocksSegment>(name, size);
    }
    spare->make_over(name, size);
    return std::move(spare);
  });
  return std::nullopt;
}

messages::PoolGrantT PoolKeeper::finish() {
  try {
    blocks_ = coming_.get();
  } catch (const Failure& failure) {
    return refusal(failure.what());
  }
  failpoint("loader.granting");
  publish(control_->newest_pool_epoch, making_);
  spdlog::info("block pool {}: {}, {} ACT and {} (kv-cache-dtype {}) in each of {}",
               control_->newest_pool_epoch, gib_text(blocks_->size()), making_.partition.act_blocks,
               counted(making_.partition.kv_blocks, "KV block"), poise::name_of(making_.kv_format),
               counted(layers_, "layer"));
  begin_growing();
  return grant();
}

void PoolKeeper::begin_growing() {
  const std::uint64_t region = control_->pool.region_bytes;
  const std::uint64_t standing = control_->pool_standing.load(std::memory_order_relaxed);
  if (standing >= region) {
    return;
  }
  stop_ = false;
  growing_ = std::async(std::launch::async, [this, region, standing] {
    const auto stands = [this](std::uint64_t bytes) {
      control_->pool_standing.store(bytes, std::memory_order_release);
    };
    blocks_->grow(region, layers_, standing, stands, stop_);
  });
}

void PoolKeeper::stop_growing() {
  if (growing_.valid()) {
    stop_ = true;
    growing_.wait();
    growing_ = {};
  }
}

messages::PoolGrantT PoolKeeper::move_border(std::uint32_t act_blocks, std::uint32_t kv_blocks) {
  if (!blocks_ || busy()) {
    return refusal("there is no block pool: claim one before moving its border");
  }
  PoolWish moved{.partition = control_->pool, .kv_format = control_->kv_format, .moved = true};
  moved.partition.act_blocks = act_blocks;
  moved.partition.kv_blocks = kv_blocks;
  if (const auto reason = why_no_partition(moved.partition, sizes(moved.kv_format), layers_)) {
    return refusal(*reason);
  }
  publish(control_->newest_pool_epoch, moved);
  failpoint("loader.border_moved");
  return grant();
}

messages::PoolGrantT PoolKeeper::release() {
  forget_claim();
  give_up();
  return grant();
}

// In this order: a loader that is killed meanwhile leaves a pool that its successor removes, rather than one that
// it misses.
void PoolKeeper::give_up() {
  stop_growing();
  const bool whole = blocks_ && control_->pool_standing.load(std::memory_order_relaxed) >=
                                    control_->pool.region_bytes;
  publish(0, {});
  if (whole) {
    spare_ = std::move(blocks_);
    look_at_spare();
  }
  blocks_.reset();
}

void PoolKeeper::look_at_spare() {
  if (spare_ && control_->spare_pool_bytes.load(std::memory_order_relaxed) == 0 &&
      spare_->is_unused()) {
    control_->spare_pool_bytes.store(static_cast<std::uint64_t>(spare_->size().n),
                                     std::memory_order_release);
  }
}

bool PoolKeeper::drop_spare() {
  control_->spare_pool_bytes.store(0, std::memory_order_release);
  return std::exchange(spare_, nullptr) != nullptr;
}

std::optional<std::string> PoolKeeper::why_no_room(Bytes bytes) const {
  const BlocksSegment* const held = blocks_ ? blocks_.get() : spare_.get();
  const Bytes pool = held != nullptr ? held->size() : Bytes{0};
  Bytes left = available_();
  if (blocks_) {  // what is not there yet is not free either
    const StandingEnds ends = standing_ends(
        control_->pool.region_bytes, control_->pool_standing.load(std::memory_order_relaxed));
    left -= Bytes{static_cast<std::int64_t>(ends.high - ends.low)} * layers_;
  }
  if (held != nullptr) {  // without a pool, weights that fitted once fit again
    left = std::min(left, asked_.value_or(budget_.cap) - weights() - pool);
  }
  if (bytes <= left) {
    return std::nullopt;
  }
  left = std::max(left, Bytes{0});
  return blocks_ ? fmt::format(
                       "{} of weights do not fit beside a pool of {}: {} are left; release "
                       "the pool first",
                       gib_text(bytes), gib_text(pool), gib_text(left))
                 : fmt::format("{} of weights do not fit any more: this machine has {} available",
                               gib_text(bytes), gib_text(left));
}

Bytes PoolKeeper::weights() const {
  return Bytes{static_cast<std::int64_t>(control_->weights_bytes)} - released_;
}

messages::PoolGrantT PoolKeeper::grant() const {
  messages::PoolGrantT grant;
  grant.granted = true;
  grant.pool_epoch = control_->pool_epoch.load(std::memory_order_acquire);
  grant.region_bytes = control_->pool.region_bytes;
  grant.act_blocks = control_->pool.act_blocks;
  grant.kv_blocks = control_->pool.kv_blocks;
  grant.kv_format = static_cast<messages::KvFormat>(control_->kv_format);
  return grant;
}

void PoolKeeper::publish(std::uint64_t epoch, const PoolWish& pool) {
  if (epoch == 0) {
    control_->pool_epoch.store(0, std::memory_order_release);
  }
  control_->pool = pool.partition;
  control_->kv_format = pool.kv_format;
  if (!pool.moved) {
    control_->pool_standing.store(pool.stands ? pool.partition.region_bytes : 0,
                                  std::memory_order_relaxed);
  }
  control_->pool_epoch.store(epoch, std::memory_order_release);
}

}  // namespace poise
