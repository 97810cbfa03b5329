#include "planner/schedule/iteration.h"

#include <vector>

namespace poise {

messages::IterationT plan_iteration(const PackingRule& rule, std::span<const ScheduledChunk> chunks,
                                    OrderTables& tables, IterationName name,
                                    const std::function<void()>& packed) {
  const std::vector<PackItem> items = pack_items(chunks);
  const std::vector<MiniBatchItems> batches = rule.policy.pack(rule.host, items, rule.limits);
  if (packed) {
    packed();
  }
  return tables.build(name.number, name.pool_epoch, chunks, items, batches);
}

}  // namespace poise
