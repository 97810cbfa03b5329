#include <algorithm>
#include <cmath>

#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"
#include "planner/policies/split_point.h"

namespace poise {
namespace {

constexpr double kDefaultKvprShare = 0.5;

class Kvpr final : public Policy {
 public:
  explicit Kvpr(const PolicyOptions& options)
      : act_share_(checked_act_share(options)),
        profile_(options.profile),
        row_by_row_(options.row_by_row) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    Allocation blocks = split_host(row_by_row_ ? one_mini_batch(inputs) : inputs, l_of_s(inputs));
    blocks.placed = row_by_row_;  // context stays on the host, weights have the device
    return blocks;
  }
  // The first l of a request's blocks, in the proportion in which all blocks were split.
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    const double act = static_cast<double>(host.all_act_blocks());
    const double share = act / std::max(act + static_cast<double>(host.all_kv_blocks()), 1.0);
    return request.act_blocks + request.kv_blocks < std::llround(share * request.most_blocks)
               ? BlockKind::act
               : BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }

 private:
  // l / s, as Eq. 12 gives it for mini-batches of the largest requests.
  double l_of_s(const AllocationInputs& inputs) const {
    if (act_share_ || !profile_) {
      return act_share_.value_or(kDefaultKvprShare);
    }
    const std::int32_t s = std::max(inputs.largest_request, 1);
    const double requests = static_cast<double>(blocks_of_mini_batch(inputs)) / s;
    const Line kv_gen = profile_->gen_of_answers(requests);
    const std::int32_t l = split_point({.load_act = profile_->load_act,
                                        .kv_gen = kv_gen,
                                        .load_kv = profile_->load_kv,
                                        .requests = requests},
                                       s);
    return static_cast<double>(l) / s;
  }

  std::optional<double> act_share_;
  std::shared_ptr<const Profile> profile_;
  bool row_by_row_;
};

}  // namespace

PolicyEntry kvpr_entry() {
  return {.name = "kvpr",
          .description =
              "the first l tokens of each request from activations, the rest as KV; l "
              "by a profile, or at --act-share (default 0.5); --schedule row-by-row: one "
              "mini-batch at a time, its context on the host",
          .source = "KVPR (2024), Eq. 11-12",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            return std::make_unique<Kvpr>(options);
          },
          .needs_profile = true};
}

}  // namespace poise
