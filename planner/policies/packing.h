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
// (Eq. 6, 7): an item joins the open mini-batch if it fits and lowers F_b. Taken literally,
// the rule closes a nearly empty mini-batch as soon as it is balanced. So an item also joins if F_b is
// then no worse than that of all remaining items, or than rounding to blocks
// makes it. Times are in units in which the host's whole split is balanced, as by
// Algorithm 1: T_kv_gen(ACT_host) =
// T_load_kv(KV_host).
std::vector<MiniBatchItems> pack_balanced(const Allocation& host, std::span<const PackItem> items,
                                          const PackLimits& limits);

// At most as many mini-batches as plain packing makes, similar in size and in their ratio of kinds.
// Items are split into those with a higher ACT : KV ratio than the whole and those with a lower one;
// each mini-batch takes the next item from the list that corrects its own ratio, until it has its share.
// Unlike the greedy rule it rejects no item for balance, and looks at each item a few times at most.
std::vector<MiniBatchItems> pack_evenly(std::span<const PackItem> items, const PackLimits& limits);

// The F_b of these blocks; infinite if only one side has work, 1 if neither has.
double imbalance(const Allocation& host, std::int64_t act_blocks, std::int64_t kv_blocks);

// Whether one mini-batch may hold exactly these items.
bool within(const PackLimits& limits, std::span<const PackItem> items, const MiniBatchItems& batch);

}  // namespace poise
