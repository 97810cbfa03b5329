#include "gpu_executor/order_check/order_check.h"

#include <algorithm>
#include <string>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kMaxIterations = 4;  // begun and not finished: this one, the next, and spare

}  // namespace

DeviceLimits limits_of(const messages::Configure& configure) {
  if (configure.kv_format() > messages::KvFormat::MAX) {
    fail("a Configure has KV blocks of format {}: there are {} formats",
         static_cast<int>(configure.kv_format()), std::size(kKvFormats));
  }
  return {.resident_layers = configure.resident_layers(),
          .max_rows = configure.max_rows(),
          .max_mini_batch_rows = configure.max_mini_batch_rows(),
          .max_sequences = configure.max_sequences(),
          .act_slots = configure.act_slots(),
          .kv_slots = configure.kv_slots(),
          .logits_rows = configure.logits_rows(),
          .max_context = configure.max_context(),
          .gpu_act_blocks = configure.gpu_act_blocks(),
          .gpu_kv_blocks = configure.gpu_kv_blocks(),
          .logit_edits = configure.logit_edits(),
          .sides = configure.sides(),
          .kv_format = static_cast<KvFormat>(configure.kv_format()),
          .host_attention = configure.host_attention(),
          .absorption = configure.absorption()};
}

void check_pool(const PoolPartition& pool, const BlockSizes& sizes, std::int32_t layers,
                Bytes segment) {
  const auto bytes = static_cast<std::uint64_t>(segment.n);
  if (pool.region_bytes == 0 || pool.region_bytes > bytes / static_cast<std::uint64_t>(layers) ||
      !pool.fits(sizes)) {
    fail(
        "the pool in the control segment is none: {} ACT and {} KV blocks in regions of {} bytes, "
        "{} layers, a segment of {} bytes",
        pool.act_blocks, pool.kv_blocks, pool.region_bytes, layers, segment.n);
  }
}

OrderCheck::OrderCheck(const ModelShape& shape, const WeightLayout& layout,
                       const DeviceLimits& limits, std::uint32_t credits)
    : shape_(shape),
      limits_(limits),
      credits_(credits),
      ledger_(limits, layout.layers, static_cast<std::int32_t>(layout.layer.pieces.size())) {}

StoreDependencies OrderCheck::accept(const messages::Iteration& iteration, const PoolNow& pool) {
  if (any_iteration_ && iteration.iteration() <= last_iteration_) {
    fail("iteration {} comes after iteration {}", iteration.iteration(), last_iteration_);
  }
  if (begun_.size() >= kMaxIterations) {
    fail("iteration {} comes while {} others are not finished", iteration.iteration(),
         begun_.size());
  }
  if (pool.epoch == 0 || iteration.pool_epoch() != pool.epoch) {
    fail("iteration {} names blocks of pool epoch {}, the pool's epoch is {}",
         iteration.iteration(), iteration.pool_epoch(), pool.epoch);
  }
  if (pool.kv_format != limits_.kv_format) {
    fail("iteration {} names blocks of a pool whose KV format is {}, the buffers' is {}",
         iteration.iteration(), name_of(pool.kv_format), name_of(limits_.kv_format));
  }
  const auto* batches = iteration.mini_batches();
  if (batches == nullptr || batches->size() == 0) {
    fail("iteration {} has no mini-batches", iteration.iteration());
  }
  std::uint64_t rows = 0;
  for (std::uint32_t i = 0; i < batches->size(); ++i) {
    const messages::MiniBatch& batch = *batches->Get(i);
    if (batch.id() != i) {
      fail("mini-batch {} of iteration {} has id {}: an id is its place", i, iteration.iteration(),
           batch.id());
    }
    check_mini_batch(batch, shape_, limits_, pool.partition);
    rows += batch.tokens()->size();
    if (rows > static_cast<std::uint64_t>(limits_.max_rows)) {
      fail("iteration {} has more than the {} rows that max_rows allows", iteration.iteration(),
           limits_.max_rows);
    }
  }
  StoreDependencies after = check_block_hazards(iteration);
  Begun begun{.mini_batches = batches->size(), .after = after};
  for (const messages::MiniBatch* batch : *batches) {
    begun.on_host.push_back(is_on_host(*batch));
  }
  begun_.emplace(iteration.iteration(), std::move(begun));
  last_iteration_ = iteration.iteration();
  any_iteration_ = true;
  return after;
}

void OrderCheck::accept(const messages::LayerOrder& order) {
  const auto found = begun_.find(order.iteration());
  if (found == begun_.end()) {
    fail("an order is of iteration {}, which was not begun, was refused or is over",
         order.iteration());
  }
  if (found != begun_.begin()) {
    fail("an order is of iteration {} while iteration {} still lacks orders", order.iteration(),
         begun_.begin()->first);
  }
  Begun& begun = found->second;
  if (order.stage() != begun.next_stage) {
    fail("an order of iteration {} is of stage {}, stage {} is next", order.iteration(),
         order.stage(), begun.next_stage);
  }
  if (running_ >= credits_) {
    fail("an order of iteration {} comes beyond the {} credits", order.iteration(), credits_);
  }
  check_mini_batches(order, begun);
  ledger_ = check_weights(order);

  ++running_;
  if (++begun.next_stage > static_cast<std::uint32_t>(shape_.num_hidden_layers) + 1) {
    begun_.erase(found);
  }
}

// All of them, each once, none before those whose stores it loads, and those of host cores last.
void OrderCheck::check_mini_batches(const messages::LayerOrder& order, const Begun& begun) const {
  std::vector<bool> seen(begun.mini_batches);
  bool host_began = false;
  const std::uint32_t named = order.mini_batches() == nullptr ? 0 : order.mini_batches()->size();
  if (named != begun.mini_batches) {
    fail("an order of iteration {}, stage {} names {} of {} mini-batches", order.iteration(),
         order.stage(), named, begun.mini_batches);
  }
  for (const std::uint32_t id : *order.mini_batches()) {
    if (id >= begun.mini_batches || seen[id]) {
      fail("an order of iteration {}, stage {} names mini-batch {} {}", order.iteration(),
           order.stage(), id, id >= begun.mini_batches ? "that does not exist" : "twice");
    }
    if (host_began && !begun.on_host[id]) {
      fail(
          "an order of iteration {}, stage {} names mini-batch {} behind one that host cores "
          "attend: these come last",
          order.iteration(), order.stage(), id);
    }
    host_began = begun.on_host[id];
    for (const std::uint32_t before : begun.after[id]) {
      if (!seen[before]) {
        fail(
            "an order of iteration {}, stage {} names mini-batch {} before {}, whose rows it loads",
            order.iteration(), order.stage(), id, before);
      }
    }
    seen[id] = true;
  }
}

// The layer buffers as this order will leave them.
LayerLedger OrderCheck::check_weights(const messages::LayerOrder& order) const {
  LayerLedger ledger = ledger_;
  const LayerId layer{order.stage() - 1};
  const bool computes = order.stage() > 0 &&
                        order.stage() <= static_cast<std::uint32_t>(shape_.num_hidden_layers) &&
                        ledger.streamed(layer);
  const int in_use = computes ? ledger.use(layer) : 0;
  const std::uint32_t first = order.mini_batches()->Get(0);
  // In the order they will be queued: behind each mini-batch's loads.
  for (const std::uint32_t id : *order.mini_batches()) {
    for (std::uint32_t i = 0; i < (order.fetch() == nullptr ? 0 : order.fetch()->size()); ++i) {
      const messages::WeightFetch& fetch = *order.fetch()->Get(i);
      if (fetch.after_mini_batch() >= order.mini_batches()->size()) {
        fail("an order fetches weights after mini-batch {} of {}", fetch.after_mini_batch(),
             order.mini_batches()->size());
      }
      if (fetch.after_mini_batch() == id) {
        ledger.fetch({fetch.layer()}, fetch.piece());
      }
    }
    if (computes && id == first) {
      ledger.check_complete(in_use);
    }
  }
  if (computes) {
    ledger.used(in_use);
  }
  return ledger;
}

void OrderCheck::abandon() {
  begun_.clear();
  ledger_.abandon();
}

}  // namespace poise
