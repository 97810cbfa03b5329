#include "planner/schedule/iteration.h"

#include <algorithm>
#include <vector>

#include "planner/policies/packing.h"

namespace poise {

// Those of host cores hold rows alone.
std::vector<MiniBatchItems> mini_batches_of(const PackingRule& rule,
                                            std::span<const PackItem> items) {
  std::vector<PackItem> here, on_host;
  MiniBatchItems here_at, on_host_at;
  for (std::size_t i = 0; i < items.size(); ++i) {
    (items[i].on_host ? on_host : here).push_back(items[i]);
    (items[i].on_host ? on_host_at : here_at).push_back(static_cast<std::int32_t>(i));
  }
  if (on_host.empty()) {
    return rule.policy.pack(rule.host, items, rule.limits);
  }
  std::vector<MiniBatchItems> batches;
  const auto add = [&](std::vector<MiniBatchItems> packed, const MiniBatchItems& at) {
    for (MiniBatchItems& batch : packed) {
      std::ranges::transform(batch, batch.begin(),
                             [&](std::int32_t i) { return at[static_cast<std::size_t>(i)]; });
      batches.push_back(std::move(batch));
    }
  };
  if (!here.empty()) {
    add(rule.policy.pack(rule.host, here, rule.limits), here_at);
  }
  add(pack_plainly(on_host, rule.limits), on_host_at);
  return batches;
}

messages::IterationT plan_iteration(const PackingRule& rule, std::span<const ScheduledChunk> chunks,
                                    OrderTables& tables, IterationName name,
                                    const std::function<void()>& packed) {
  const std::vector<PackItem> items = pack_items(chunks);
  const std::vector<MiniBatchItems> batches = mini_batches_of(rule, items);
  if (packed) {
    packed();
  }
  return tables.build(name.number, name.pool_epoch, chunks, items, batches);
}

}  // namespace poise
