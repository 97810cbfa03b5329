#pragma once
// The only way from a schedule to messages: the policy packs chunks into mini-batches, and their tables are
// built. The run, predictions in virtual time and simulations all plan an iteration here, so that the
// predicted iteration is the ordered one. A function of its arguments; one thread.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/messages_generated.h"
#include "planner/policies/policy.h"
#include "planner/schedule/orders.h"
#include "planner/schedule/schedule.h"

namespace poise {

// What decides which mini-batches an iteration has.
struct PackingRule {
  const Policy& policy;
  const Allocation& host;  // the split that the policy wished for
  PackLimits limits;
};

// As messages name it.
struct IterationName {
  std::uint64_t number = 1;
  std::uint64_t pool_epoch = 1;
};

// The mini-batches of an iteration: the policy's, and behind them those of sequences that host cores attend.
std::vector<MiniBatchItems> mini_batches_of(const PackingRule& rule,
                                            std::span<const PackItem> items);

// The tables of the iteration that runs `chunks`. REQUIRES: `tables` has room for every block that they
// name. `packed` is called once mini-batches are chosen, before their tables are built.
messages::IterationT plan_iteration(const PackingRule& rule, std::span<const ScheduledChunk> chunks,
                                    OrderTables& tables, IterationName name,
                                    const std::function<void()>& packed = {});

}  // namespace poise
