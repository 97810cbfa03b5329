#pragma once
// How policies form mini-batches (CAPTURE section IV-C.3). Pure functions; each gives every item to
// exactly one mini-batch within the limits, in an order that depends on the arguments alone.

#include <span>
#include <vector>

#include "planner/policies/policy.h"

namespace poise {

// First fit, in the items' order.
std::vector<MiniBatchItems> pack_plainly(std::span<const PackItem> items, const PackLimits& limits);

// The greedy rule on F_b = max(balance, 1 / balance), balance = T_kv_gen(#ACT) / T_load_kv(#KV)
// (Eq. 6, 7): an item joins the mini-batch being filled if it fits and lowers F_b. Taken literally
// that rule closes a mini-batch as soon as it is balanced, however empty it is; so an item joins too
// where F_b afterwards is no worse than that of all that is left to pack, or than rounding to blocks
// makes it. Times are taken in units
// in which the host's whole split is balanced, as Algorithm 1 makes it: T_kv_gen(ACT_host) =
// T_load_kv(KV_host).
std::vector<MiniBatchItems> pack_balanced(const Allocation& host, std::span<const PackItem> items,
                                          const PackLimits& limits);

// As few mini-batches as plain packing makes, or fewer, alike in size and in kinds: each takes its
// items in turn from those that bring more ACT than the whole has for its KV and from those that
// bring less, whichever sets its own ratio right, until it has its share of what is left. Unlike the
// greedy rule it refuses nobody for balance, and looks at each item a few times at most.
std::vector<MiniBatchItems> pack_evenly(std::span<const PackItem> items, const PackLimits& limits);

// The F_b of so many blocks; infinite where one side has nothing to do and the other has, 1 where
// both have nothing.
double imbalance(const Allocation& host, std::int64_t act_blocks, std::int64_t kv_blocks);

// Whether one mini-batch may hold exactly these items.
bool within(const PackLimits& limits, std::span<const PackItem> items, const MiniBatchItems& batch);

}  // namespace poise
