#include "planner/virtual_time/link_idle.h"

#include <algorithm>

namespace poise {
namespace {

constexpr int kLayers = 6;  // after these the pattern repeats

}  // namespace

std::vector<Seconds> link_idle(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
                               std::span<const GroupCost> products, std::size_t sides) {
  std::vector<Seconds> idle(costs.size()), computed(sides);
  const RowGroup* const ahead = sent_ahead(groups);
  Seconds link{}, compute{}, host{};
  std::size_t visits = 0, before = costs.size();  // `before`: the mini-batch loaded last
  for (int layer = 0; layer < kLayers; ++layer) {
    if (ahead != nullptr) {
      compute += products[static_cast<std::size_t>(ahead - groups.data())].qkv;
      host = std::max(host, compute);
    }
    for (std::size_t number = 0; number < groups.size(); ++number) {
      const RowGroup& group = groups[number];
      if (&group != ahead) {
        compute += products[number].qkv;
        host = std::max(host, compute);
      }
      for (std::size_t i = group.begin; i < group.end; ++i) {
        const BatchCost& cost = costs[i];
        if (cost.on_host) {
          host += cost.host;
          compute = std::max(compute, host) + cost.up;
          continue;
        }
        Seconds& side = computed[visits++ % sides];
        const Seconds begin = std::max(link, side);
        if (before < costs.size()) {
          idle[before] = begin - link;
        }
        before = i;
        link = begin + cost.load_act + cost.load_kv;
        compute = std::max(compute, begin + cost.load_act) + cost.regenerate;
        compute = side = std::max(compute, link) + cost.attend;
      }
      compute += products[number].forward - products[number].qkv;
    }
  }
  return idle;
}

}  // namespace poise
