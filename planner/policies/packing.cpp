#include "planner/policies/packing.h"

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <numeric>
#include <optional>

#include "common/trouble.h"

namespace poise {
namespace {

// Requests of one ratio still differ by a block. Closing a mini-batch for a smaller imbalance costs more
// than it saves: the next one's loads compensate for it.
constexpr double kReachable = 1.15;
constexpr std::size_t kOpenMiniBatches = 64;  // how many of the last ones first fit looks at

// A mini-batch while it fills.
struct Fill {
  std::int64_t act_slots = 0, kv_slots = 0, act_loads = 0, kv_loads = 0, rows = 0, sequences = 0;
  std::int64_t items = 0;

  Fill operator+(const PackItem& item) const {
    return {act_slots + item.act_slots,
            kv_slots + item.kv_slots,
            act_loads + item.act_loads,
            kv_loads + item.kv_loads,
            rows + item.rows,
            sequences + item.sequences,
            items + 1};
  }
  Fill operator-(const Fill& other) const {
    return {act_slots - other.act_slots, kv_slots - other.kv_slots, act_loads - other.act_loads,
            kv_loads - other.kv_loads,   rows - other.rows,         sequences - other.sequences,
            items - other.items};
  }
  bool within(const PackLimits& limits) const {
    return act_slots <= limits.act_slots && kv_slots <= limits.kv_slots && rows <= limits.rows &&
           sequences <= limits.sequences &&
           (items <= 1 || (act_slots + kv_slots) * kBlockTokens <= limits.tokens);
  }
};

double imbalance(const PackBalance& balance, const Fill& fill) {
  return balance.imbalance(fill.act_loads, fill.kv_loads);
}

Fill start(const PackItem& item, const PackLimits& limits) {
  const Fill alone = Fill{} + item;
  check(alone.within(limits), "a sequence alone fits into a mini-batch");
  return alone;
}

// Whether the mini-batch may grow from `before` to `after`. A sequence that loads nothing (a new
// prompt) leaves the balance as it is and is always welcome.
bool balances(const PackBalance& balance, const Fill& before, const Fill& after, double reachable) {
  if (after.act_loads == before.act_loads && after.kv_loads == before.kv_loads) {
    return true;
  }
  const double imbalance_after = imbalance(balance, after);
  return imbalance_after <= reachable * kReachable || imbalance_after < imbalance(balance, before);
}

// The least of everything that any item brings.
PackItem smallest_of(std::span<const PackItem> items) {
  PackItem least = items.front();
  for (const PackItem& item : items) {
    least.act_slots = std::min(least.act_slots, item.act_slots);
    least.kv_slots = std::min(least.kv_slots, item.kv_slots);
    least.rows = std::min(least.rows, item.rows);
    least.sequences = std::min(least.sequences, item.sequences);
  }
  return least;
}

// The greedy rule, one mini-batch after the other.
class GreedyPacking {
 public:
  GreedyPacking(const PackBalance& balance, std::span<const PackItem> items,
                const PackLimits& limits)
      : balance_(balance),
        items_(items),
        limits_(limits),
        smallest_(smallest_of(items)),
        left_(items.size()) {
    std::iota(left_.begin(), left_.end(), 0);
    for (const PackItem& item : items) {
      whole_ = whole_ + item;
    }
  }
  bool done() const { return left_.empty(); }

  // One mini-batch from what is left: the first item, then the items that join, in two passes, since an item
  // refused early may balance what came later.
  MiniBatchItems next() {
    const double reachable = imbalance(balance_, whole_);
    MiniBatchItems batch{left_.front()};
    Fill fill = start(item(left_.front()), limits_);
    left_.erase(left_.begin());
    bool full = false;  // not even the smallest item would fit
    for (int round = 0; round < 2 && !full; ++round) {
      std::size_t kept = 0, i = 0;
      for (; i < left_.size() && !full; ++i) {
        const Fill joined = fill + item(left_[i]);
        if (joined.within(limits_) && balances(balance_, fill, joined, reachable)) {
          batch.push_back(left_[i]);
          fill = joined;
          full = !(fill + smallest_).within(limits_);
        } else {
          left_[kept++] = left_[i];
        }
      }
      left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(kept),
                  left_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    whole_ = whole_ - fill;
    return batch;
  }

 private:
  const PackItem& item(std::int32_t i) const { return items_[static_cast<std::size_t>(i)]; }

  const PackBalance& balance_;
  const std::span<const PackItem> items_;
  const PackLimits& limits_;
  const PackItem smallest_;
  Fill whole_;  // of all that is left
  std::vector<std::int32_t> left_;
};

class EvenPacking {
 public:
  EvenPacking(std::span<const PackItem> items, const PackLimits& limits)
      : items_(items), limits_(limits) {
    for (const PackItem& item : items) {
      whole_ = whole_ + item;
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      waiting_[excess(items[i]) > 0 ? 1 : 0].push_back(static_cast<std::int32_t>(i));
    }
  }

  // No packing has fewer mini-batches.
  std::size_t fewest() const {
    const auto need = [](std::int64_t sum, std::int64_t limit) {
      return sum == 0 ? 0 : ceil_div(sum, std::max<std::int64_t>(limit, 1));
    };
    return static_cast<std::size_t>(std::max(
        {need(whole_.act_slots, limits_.act_slots), need(whole_.kv_slots, limits_.kv_slots),
         need(whole_.rows, limits_.rows), need(whole_.sequences, limits_.sequences)}));
  }

  // Aims at this number of mini-batches.
  std::vector<MiniBatchItems> into(std::size_t wanted) {
    queues_ = waiting_;
    std::vector<MiniBatchItems> batches;
    Fill left = whole_;
    while (left.items > 0) {
      const auto more =
          static_cast<std::int64_t>(wanted > batches.size() ? wanted - batches.size() : 1);
      const std::int64_t share = ceil_div(size(left), more);
      MiniBatchItems batch;
      Fill fill;
      while (batch.empty() || size(fill) < share || more == 1) {
        const auto taken = take(fill);
        if (!taken) {
          break;
        }
        const PackItem& item = items_[static_cast<std::size_t>(*taken)];
        batch.push_back(*taken);
        fill = fill + item;
      }
      check(!batch.empty(), "a sequence alone fits into a mini-batch");
      left = left - fill;
      batches.push_back(std::move(batch));
    }
    return batches;
  }

 private:
  static constexpr std::ptrdiff_t kLookAhead = 16;

  static std::int64_t size(const Fill& fill) { return fill.act_slots + fill.kv_slots + fill.rows; }
  // What it brings of ACT beyond the whole's ratio.
  template <typename Loads>
  double excess(const Loads& of) const {
    return static_cast<double>(of.act_loads) * static_cast<double>(whole_.kv_loads) -
           static_cast<double>(of.kv_loads) * static_cast<double>(whole_.act_loads);
  }

  // The next item that fits; of the queue that sets the ratio right, if one of its first does.
  std::optional<std::int32_t> take(const Fill& fill) {
    const std::size_t first = excess(fill) > 0 ? 0 : 1;
    for (const std::size_t which : {first, 1 - first}) {
      std::deque<std::int32_t>& queue = queues_[which];
      const auto end = queue.begin() + std::min(kLookAhead, std::ssize(queue));
      const auto fits = std::find_if(queue.begin(), end, [&](std::int32_t i) {
        return (fill + items_[static_cast<std::size_t>(i)]).within(limits_);
      });
      if (fits != end) {
        const std::int32_t taken = *fits;
        queue.erase(fits);
        return taken;
      }
    }
    return std::nullopt;
  }

  const std::span<const PackItem> items_;
  const PackLimits limits_;
  Fill whole_;
  std::array<std::deque<std::int32_t>, 2> waiting_, queues_;
};

}  // namespace

double PackBalance::imbalance(std::int64_t act_blocks, std::int64_t kv_blocks) const {
  const double making = kv_gen.straight(static_cast<double>(act_blocks)).n;
  const double loading = load_kv.straight(static_cast<double>(kv_blocks)).n;
  if (making == 0 && loading == 0) {
    return 1;
  }
  if (making == 0 || loading == 0) {
    return std::numeric_limits<double>::infinity();
  }
  return std::max(making / loading, loading / making);
}

PackBalance balance_of(const Profile& profile) {
  const Line kv_gen = profile.gen_of_answers(0);  // a row pays the same in any mini-batch
  return {.kv_gen = {.a = kv_gen.a, .b = kv_gen.b},
          .load_kv = {.a = profile.load_kv.a, .b = profile.load_kv.b}};
}

PackBalance balance_of(const Allocation& host) {
  return {.kv_gen = {.b = static_cast<double>(host.kv_blocks)},
          .load_kv = {.b = static_cast<double>(host.all_act_blocks())}};
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

std::vector<MiniBatchItems> pack_evenly(std::span<const PackItem> items, const PackLimits& limits) {
  const std::vector<MiniBatchItems> plain = pack_plainly(items, limits);
  EvenPacking packing(items, limits);
  std::vector<MiniBatchItems> even = packing.into(packing.fewest());
  if (even.size() > packing.fewest()) {  // whole items did not fill them: again, with that in mind
    even = packing.into(std::min(even.size(), plain.size()));
  }
  return even.size() <= plain.size() ? even : plain;
}

std::vector<MiniBatchItems> pack_balanced(const PackBalance& balance,
                                          std::span<const PackItem> items,
                                          const PackLimits& limits) {
  if (balance.kv_gen.straight(1).n == 0 || balance.load_kv.straight(1).n == 0) {
    return pack_plainly(items, limits);
  }
  std::vector<MiniBatchItems> batches;
  if (items.empty()) {
    return batches;
  }
  for (GreedyPacking packing(balance, items, limits); !packing.done();) {
    batches.push_back(packing.next());
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
