#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

class HostKv final : public Policy {
 public:
  Allocation allocate(const AllocationInputs& inputs) const override {
    Allocation blocks = split_host(inputs, 0);
    blocks.host_share = 1;
    blocks.host_blocks = blocks.kv_blocks;
    blocks.placed = true;  // no blocks on the device, and as many layers as fit
    return blocks;
  }
  BlockKind next_block(const Allocation&, const RequestSplit&) const override {
    return BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }
};

}  // namespace

PolicyEntry host_kv_entry() {
  return {.name = "host-kv",
          .description = "keys and values stay in host memory, and host cores attend them there",
          .source = "NEO (MLSys 2025), FastDecode (2024)",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("host-kv", options);
            return std::make_unique<HostKv>();
          },
          .attends_on_host = true};
}

}  // namespace poise
