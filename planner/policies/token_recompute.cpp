#include <algorithm>
#include <cmath>

#include "common/trouble.h"
#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

constexpr double kDefaultShare = 0.25;

// Of each request the first blocks are kept as token ids alone: their tokens run through all layers
// again in every iteration, and make keys and values that no layer keeps. The others are KV blocks.
class TokenRecompute final : public Policy {
 public:
  explicit TokenRecompute(double share) : share_(share) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    const std::int32_t largest = token_blocks(inputs.largest_request);
    AllocationInputs kept = inputs;
    // Those of all requests: the share rounded in each, so at most half a block more a request.
    kept.most_blocks = std::min<std::int64_t>(
        inputs.most_blocks,
        static_cast<std::int64_t>(std::ceil((1 - share_) * static_cast<double>(inputs.most_blocks) +
                                            0.5 * inputs.sequences)));
    Allocation blocks = split_host(kept, 0);
    blocks.token_blocks = largest;
    return blocks;
  }
  BlockKind next_block(const Allocation&, const RequestSplit&) const override {
    return BlockKind::kv;
  }
  std::int32_t token_blocks(std::int32_t most_blocks) const override {
    // The last block is never among them, so that there is a pool.
    return std::min(static_cast<std::int32_t>(std::llround(share_ * most_blocks)),
                    std::max(most_blocks - 1, 0));
  }
  bool runs_tokens_again() const override { return share_ > 0; }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }

 private:
  double share_;  // of a request's blocks
};

}  // namespace

PolicyEntry token_recompute_entry() {
  return {.name = "token-recompute",
          .description =
              "a share of context is made again from token ids through all layers in every "
              "iteration, --recompute-share (default 0.25); the rest as KV",
          .source = "CAPTURE (ICCD 2025), section III-B's baseline",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("token-recompute", options);
            const double share = options.recompute_share.value_or(kDefaultShare);
            if (!(share >= 0 && share <= 1)) {
              fail("--recompute-share {}: the share of blocks lies between 0 and 1", share);
            }
            return std::make_unique<TokenRecompute>(share);
          }};
}

}  // namespace poise
