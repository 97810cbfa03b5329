#include "planner/policies/algorithm1.h"
#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

constexpr double kDefaultActShare = 0.5;

class Hybrid final : public Policy {
 public:
  explicit Hybrid(const PolicyOptions& options)
      : act_share_(checked_act_share(options)), profile_(options.profile) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    if (act_share_ || !profile_) {
      return split_host(inputs, act_share_.value_or(kDefaultActShare));
    }
    // The layers that stay on the device depend on its buffers, and these on the split.
    Allocation blocks = balanced(inputs, inputs.fixed.resident_layers.value_or(0));
    for (int round = 0; round < kRounds; ++round) {
      blocks = balanced(inputs, resident_layers(inputs, blocks));
    }
    return blocks;
  }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    return keep_ratio(host, request);
  }
  std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_balanced(profile_ ? balance_of(*profile_) : balance_of(host), items, limits);
  }

 private:
  static constexpr int kRounds = 2;

  static std::int32_t resident_layers(const AllocationInputs& inputs, const Allocation& blocks) {
    if (inputs.fixed.resident_layers) {
      return *inputs.fixed.resident_layers;
    }
    const std::int64_t act = blocks.all_act_blocks(), kv = blocks.all_kv_blocks();
    return inputs.resident_layers && act + kv > 0 ? inputs.resident_layers(act, kv, 0) : 0;
  }

  // Algorithm 1 with what a layer takes on the average: no weights cross the link for `resident` of
  // them, and every mini-batch pays the lines' constants. `inputs.host` is what M_Host has left beside
  // S_weight.
  // ACT blocks that later find a place on the device (planner/memory/sizes.h) are taken from the host's:
  // as far as Algorithm 1 counts, that moves nothing, since computation has them all and the link is not
  // charged for them.
  Allocation balanced(const AllocationInputs& inputs, std::int32_t resident) const {
    const double streamed = 1 - static_cast<double>(resident) / inputs.layers;
    const auto mini_batches =
        static_cast<double>(ceil_div(inputs.most_blocks, blocks_of_mini_batch(inputs)));
    const double rows = inputs.sequences / mini_batches;
    const auto of_all = [&](const Line& line) {
      return Line{.a = line.a * mini_batches, .b = line.b};
    };
    const HostBlocksSplit split =
        algorithm1_filled({.load_w = profile_->load_w(1) * streamed,
                           .kv_gen = of_all(profile_->gen_of_answers(rows)),
                           .load_kv = of_all(profile_->load_kv),
                           .host = inputs.host,
                           .kv_block = inputs.sizes.block(BlockKind::kv) * inputs.layers,
                           .act_block = inputs.sizes.block(BlockKind::act) * inputs.layers},
                          static_cast<double>(inputs.most_blocks));
    return split_host(inputs, split.act_share());
  }

  std::optional<double> act_share_;  // of the blocks
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry hybrid_entry() {
  return {.name = "hybrid",
          .description =
              "ACT and KV blocks so that link and computation take as long, by a "
              "profile, or at --act-share (default 0.5); mini-batches balanced",
          .source = "CAPTURE (ICCD 2025), Algorithm 1, Eq. 5-7; HybridServe, Eq. 11-13",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            return std::make_unique<Hybrid>(options);
          },
          .needs_profile = true};
}

}  // namespace poise
