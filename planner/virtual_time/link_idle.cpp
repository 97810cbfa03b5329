#include "planner/virtual_time/link_idle.h"

#include <algorithm>

namespace poise {
namespace {

// The streams, in layers one after the other.
class Layers {
 public:
  Layers(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
         std::span<const GroupCost> products, std::size_t sides)
      : costs_(costs),
        groups_(groups),
        products_(products),
        ahead_(sent_ahead(groups)),
        sides_(sides),
        idle_(costs.size()),
        last_(costs.size()) {}

  // In the order in which VirtualExecutor::run_layer gives the streams their work.
  void run_one() {
    load(0);
    Seconds sent{};
    if (ahead_ != nullptr) {
      compute_ += products_[static_cast<std::size_t>(ahead_ - groups_.data())].qkv;
      compute_ = sent = send();
    }
    for (std::size_t number = 0; number < groups_.size(); ++number) {
      const RowGroup& group = groups_[number];
      if (&group != ahead_) {
        compute_ += products_[number].qkv;
        sent = holds_host_rows(group) ? send() : sent;
      }
      for (std::size_t i = group.begin; i < group.end; ++i) {
        load(i + 1);
        compute(i, sent);
      }
      compute_ += products_[number].forward - products_[number].qkv;
    }
  }
  const std::vector<Seconds>& idle() const { return idle_; }

 private:
  struct Side {
    Seconds act_loaded, loaded, here, computed;
  };

  bool holds_host_rows(const RowGroup& group) const {
    return std::any_of(costs_.begin() + static_cast<std::ptrdiff_t>(group.begin),
                       costs_.begin() + static_cast<std::ptrdiff_t>(group.end),
                       [](const BatchCost& cost) { return cost.on_host; });
  }
  // Queries go down behind what is on its way out.
  Seconds send() { return out_ = std::max(out_, compute_); }

  void load(std::size_t i) {
    if (i == costs_.size() || costs_[i].on_host) {
      return;
    }
    const BatchCost& cost = costs_[i];
    Side& side = sides_[loaded_++ % sides_.size()];
    const Seconds begin = std::max(link_, side.computed);
    if (last_ < idle_.size()) {
      idle_[last_] = begin - link_;
    }
    last_ = i;
    side.act_loaded = begin + cost.load_act;
    side.loaded = link_ = side.act_loaded + cost.load_kv;
    side.here = {};
    if (cost.here.n > 0) {
      side.here = out_ = std::max(out_, side.computed) + cost.here;
    }
  }

  // `sent`: when its queries were, where host cores attend it.
  void compute(std::size_t i, Seconds sent) {
    const BatchCost& cost = costs_[i];
    if (cost.on_host) {
      host_ = std::max(host_, sent) + cost.host;
      compute_ = std::max(compute_, host_) + cost.up;
      return;
    }
    Side& side = sides_[computed_++ % sides_.size()];
    compute_ = std::max({compute_, side.act_loaded, side.here}) + cost.regenerate;
    compute_ = side.computed = std::max(compute_, side.loaded) + cost.attend;
  }

  const std::span<const BatchCost> costs_;
  const std::span<const RowGroup> groups_;
  const std::span<const GroupCost> products_;
  const RowGroup* const ahead_;
  std::vector<Side> sides_;
  std::vector<Seconds> idle_;
  std::size_t last_;  // the mini-batch loaded last; as many as there are: none was
  std::size_t loaded_ = 0, computed_ = 0;
  Seconds link_{}, compute_{}, out_{}, host_{};
};

}  // namespace

std::vector<Seconds> link_idle(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
                               std::span<const GroupCost> products, std::size_t sides,
                               std::int32_t layers) {
  Layers stream(costs, groups, products, sides);
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    stream.run_one();
  }
  return stream.idle();
}

}  // namespace poise
