#include "planner/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kOpenMiniBatches = 64;  // first fit looks back at so many

// A mini-batch while it fills.
struct Fill {
  std::int64_t act_slots = 0, kv_slots = 0, act_loads = 0, kv_loads = 0, rows = 0, sequences = 0;

  Fill operator+(const PackItem& item) const {
    return {act_slots + item.act_slots, kv_slots + item.kv_slots, act_loads + item.act_loads,
            kv_loads + item.kv_loads,   rows + item.rows,         sequences + 1};
  }
  bool within(const PackLimits& limits) const {
    return act_slots <= limits.act_slots && kv_slots <= limits.kv_slots && rows <= limits.rows &&
           sequences <= limits.sequences &&
           (sequences <= 1 || (act_slots + kv_slots) * kBlockTokens <= limits.tokens);
  }
};

double imbalance(const Allocation& host, const Fill& fill) {
  return poise::imbalance(host, fill.act_loads, fill.kv_loads);
}

Fill start(const PackItem& item, const PackLimits& limits) {
  const Fill alone = Fill{} + item;
  check(alone.within(limits), "a sequence alone fits into a mini-batch");
  return alone;
}

// Whether the mini-batch may grow from `before` to `after`. A sequence that loads nothing (a new
// prompt) leaves the balance as it is and is always welcome.
bool balances(const Allocation& host, const Fill& before, const Fill& after, double reachable) {
  if (after.act_loads == before.act_loads && after.kv_loads == before.kv_loads) {
    return true;
  }
  const double imbalance_after = imbalance(host, after);
  return imbalance_after <= reachable || imbalance_after < imbalance(host, before);
}

// One mini-batch from what is left: the first item, then whoever joins, twice round, since an item
// refused early may balance what came later. Takes its items out of `left`.
MiniBatchItems fill_one(const Allocation& host, std::span<const PackItem> items,
                        const PackLimits& limits, std::vector<std::int32_t>& left) {
  Fill whole;
  for (const std::int32_t i : left) {
    whole = whole + items[static_cast<std::size_t>(i)];
  }
  const double reachable = imbalance(host, whole);
  MiniBatchItems batch{left.front()};
  Fill fill = start(items[static_cast<std::size_t>(left.front())], limits);
  left.erase(left.begin());
  for (int round = 0; round < 2; ++round) {
    std::size_t kept = 0;
    for (const std::int32_t i : left) {
      const PackItem& item = items[static_cast<std::size_t>(i)];
      const Fill joined = fill + item;
      if (joined.within(limits) && balances(host, fill, joined, reachable)) {
        batch.push_back(i);
        fill = joined;
      } else {
        left[kept++] = i;
      }
    }
    left.resize(kept);
  }
  return batch;
}

}  // namespace

double imbalance(const Allocation& host, std::int64_t act_blocks, std::int64_t kv_blocks) {
  const double kv_gen = static_cast<double>(act_blocks) * host.kv_blocks;
  const double load_kv = static_cast<double>(kv_blocks * host.all_act_blocks());
  if (kv_gen == 0 && load_kv == 0) {
    return 1;
  }
  if (kv_gen == 0 || load_kv == 0) {
    return std::numeric_limits<double>::infinity();
  }
  return std::max(kv_gen / load_kv, load_kv / kv_gen);
}

std::vector<MiniBatchItems> pack_plainly(std::span<const PackItem> items,
                                         const PackLimits& limits) {
  std::vector<MiniBatchItems> batches;
  std::vector<Fill> fills;
  for (std::size_t i = 0; i < items.size(); ++i) {
    std::size_t batch = fills.size() > kOpenMiniBatches ? fills.size() - kOpenMiniBatches : 0;
    while (batch < fills.size() && !(fills[batch] + items[i]).within(limits)) {
      ++batch;
    }
    if (batch == fills.size()) {
      fills.push_back(start(items[i], limits));
      batches.emplace_back();
    } else {
      fills[batch] = fills[batch] + items[i];
    }
    batches[batch].push_back(static_cast<std::int32_t>(i));
  }
  return batches;
}

std::vector<MiniBatchItems> pack_balanced(const Allocation& host, std::span<const PackItem> items,
                                          const PackLimits& limits) {
  if (host.all_act_blocks() == 0 || host.kv_blocks == 0) {
    return pack_plainly(items, limits);
  }
  std::vector<std::int32_t> left(items.size());
  std::iota(left.begin(), left.end(), 0);
  std::vector<MiniBatchItems> batches;
  while (!left.empty()) {
    batches.push_back(fill_one(host, items, limits, left));
  }
  return batches;
}

bool within(const PackLimits& limits, std::span<const PackItem> items,
            const MiniBatchItems& batch) {
  Fill fill;
  for (const std::int32_t i : batch) {
    fill = fill + items[static_cast<std::size_t>(i)];
  }
  return fill.within(limits);
}

}  // namespace poise
