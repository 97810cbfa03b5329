#include "planner/virtual_time/link_idle.h"

#include <algorithm>
#include <cmath>

namespace poise {
namespace {

constexpr double kSame = 1e-9;  // seconds

// The streams, layer after layer.
class Layers {
 public:
  Layers(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
         std::span<const GroupCost> products, std::size_t sides)
      : costs_(costs),
        groups_(groups),
        products_(products),
        ahead_(sent_ahead(groups)),
        computed_(sides),
        idle_(costs.size()),
        last_(costs.size()) {}

  void run_one() {
    Seconds ahead{};
    if (ahead_ != nullptr) {
      ahead = compute_ += products_[static_cast<std::size_t>(ahead_ - groups_.data())].qkv;
    }
    for (std::size_t number = 0; number < groups_.size(); ++number) {
      const RowGroup& group = groups_[number];
      const bool sent = &group == ahead_;
      compute_ += sent ? Seconds{} : products_[number].qkv;
      const Seconds queries = sent ? ahead : compute_;
      for (std::size_t i = group.begin; i < group.end; ++i) {
        if (costs_[i].on_host) {
          host_ = std::max(host_, queries) + costs_[i].host;
          compute_ = std::max(compute_, host_) + costs_[i].up;
        } else {
          run_on_device(i);
        }
      }
      compute_ += products_[number].forward - products_[number].qkv;
    }
  }
  const std::vector<Seconds>& idle() const { return idle_; }

 private:
  void run_on_device(std::size_t i) {
    const BatchCost& cost = costs_[i];
    Seconds& side = computed_[visits_++ % computed_.size()];
    const Seconds begin = std::max(link_, side);
    if (last_ < idle_.size()) {
      idle_[last_] = begin - link_;
    }
    last_ = i;
    link_ = begin + cost.load_act + cost.load_kv;
    if (cost.here.n > 0) {
      out_ = std::max(out_, side) + cost.here;
    }
    compute_ = std::max({compute_, begin + cost.load_act, out_}) + cost.regenerate;
    compute_ = side = std::max(compute_, link_) + cost.attend;
  }

  const std::span<const BatchCost> costs_;
  const std::span<const RowGroup> groups_;
  const std::span<const GroupCost> products_;
  const RowGroup* const ahead_;
  std::vector<Seconds> computed_;  // by side
  std::vector<Seconds> idle_;
  std::size_t last_;  // the mini-batch loaded last; as many as there are: none was
  std::size_t visits_ = 0;
  Seconds link_{}, compute_{}, out_{}, host_{};
};

}  // namespace

std::vector<Seconds> link_idle(std::span<const BatchCost> costs, std::span<const RowGroup> groups,
                               std::span<const GroupCost> products, std::size_t sides,
                               std::int32_t layers) {
  Layers stream(costs, groups, products, sides);
  stream.run_one();
  for (std::int32_t layer = 1; layer < layers; ++layer) {
    const std::vector<Seconds> before = stream.idle();
    stream.run_one();
    const auto same = [](Seconds a, Seconds b) { return std::abs(a.n - b.n) < kSame; };
    if (layer > 1 && std::ranges::equal(before, stream.idle(), same)) {
      break;
    }
  }
  return stream.idle();
}

}  // namespace poise
