#pragma once
// How policies form mini-batches (CAPTURE section IV-C.3). Pure functions; each gives every item to
// exactly one mini-batch within the limits, in an order that depends on the arguments alone.

#include <span>
#include <vector>

#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

// First fit, in the items' order.
std::vector<MiniBatchItems> pack_plainly(std::span<const PackItem> items, const PackLimits& limits);

// What F_b weighs against each other (Eq. 6): T_kv_gen of a mini-batch's ACT blocks, wherever they lie
// (Eq. 3), and T_load_kv of the KV blocks that cross the link, which those of the device do not.
struct PackBalance {
  Line kv_gen, load_kv;  // as lines: no step in measured times closes a mini-batch

  // F_b = max(balance, 1 / balance) (Eq. 7); infinite where one side has nothing to do and the other
  // has, 1 where both have nothing.
  double imbalance(std::int64_t act_blocks, std::int64_t kv_blocks) const;
};
PackBalance balance_of(const Profile& profile);
// Without a profile: in units in which the whole split is balanced, as Algorithm 1 makes it,
// T_kv_gen(ACT) = T_load_kv(KV_host).
PackBalance balance_of(const Allocation& host);

// The greedy rule: an item joins the mini-batch being filled if it fits and lowers F_b. Taken literally
// that rule closes a mini-batch as soon as it is balanced, however empty it is; so an item joins too
// where F_b afterwards is no worse than that of all that is left to pack, but for what rounding to
// blocks makes it. First fit where the balance knows no time of one side.
std::vector<MiniBatchItems> pack_balanced(const PackBalance& balance,
                                          std::span<const PackItem> items,
                                          const PackLimits& limits);

// At most as many mini-batches as plain packing makes, similar in size and in their ratio of kinds.
// Items are split into those with a higher ACT : KV ratio than the whole and those with a lower one;
// each mini-batch takes the next item from the list that corrects its own ratio, until it has its share.
// Unlike the greedy rule it rejects no item for balance, and looks at each item a few times at most.
std::vector<MiniBatchItems> pack_evenly(std::span<const PackItem> items, const PackLimits& limits);

// Whether one mini-batch may hold exactly these items.
bool within(const PackLimits& limits, std::span<const PackItem> items, const MiniBatchItems& batch);

}  // namespace poise
