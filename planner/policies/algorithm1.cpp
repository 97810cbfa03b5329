#include "planner/policies/algorithm1.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {
namespace {

double number(Bytes bytes) { return static_cast<double>(bytes.n); }

// Line 11
HostBlocksSplit init_cache_alloc(const Algorithm1& given) {
  HostBlocksSplit init;                                                        // line 12
  const Seconds budget = given.load_w - given.kv_gen.straight(given.act_gpu);  // line 13
  if (budget.n >= 0) {                                                         // line 14
    init.act = given.kv_gen.find(budget);                                      // line 15
  } else {                                                                     // line 16
    init.kv = given.load_kv.find(Seconds{-budget.n});                          // line 17
  }
  return init;  // line 18
}

// Line 20
HostBlocksSplit alloc_remain(const Algorithm1& given, const HostBlocksSplit& init) {
  const double act_size = number(given.act_block), kv_size = number(given.kv_block);
  const double occupied = act_size * init.act + kv_size * init.kv;                 // line 21
  const double remaining = number(given.host) - number(given.weights) - occupied;  // line 22
  // Lines 23 to 25: two equations, S_ACT · act + S_KV · kv = remaining and
  // a_gen + b_gen · act = a_load + b_load · kv, solved for kv and put into the first. Constants
  // that step 1 has charged are not charged again (for the paper both times are proportional), and what
  // it could not level, a budget below a constant, counts here.
  const double gen = given.kv_gen.b, load = given.load_kv.b;
  const double act_begun = init.act + given.act_gpu;
  const double left =
      given.load_w.n + given.load_kv.straight(init.kv).n - given.kv_gen.straight(act_begun).n;
  const double ahead =
      (act_begun > 0 ? 0 : given.kv_gen.a) - (init.kv > 0 ? 0 : given.load_kv.a) - left;
  double act = (remaining - kv_size * ahead / load) / (act_size + kv_size * gen / load);
  act = std::clamp(act, 0.0, remaining / act_size);  // where constants alone are out of balance
  return {.act = act, .kv = (remaining - act_size * act) / kv_size};  // line 26
}

}  // namespace

HostBlocksSplit algorithm1(const Algorithm1& given) {
  check(given.kv_gen.b > 0 && given.load_kv.b > 0 && given.act_block.n > 0 && given.kv_block.n > 0,
        "Algorithm 1 takes costs and sizes above 0");
  const double room = std::max(0.0, number(given.host) - number(given.weights));
  HostBlocksSplit init = init_cache_alloc(given);  // line 2
  const double wanted = number(given.act_block) * init.act + number(given.kv_block) * init.kv;
  if (wanted >= room) {
    return {.act = init.act * (room / std::max(wanted, 1.0)),
            .kv = init.kv * (room / std::max(wanted, 1.0))};
  }
  const HostBlocksSplit remain = alloc_remain(given, init);          // lines 5 and 6
  return {.act = init.act + remain.act, .kv = init.kv + remain.kv};  // line 9
}

HostBlocksSplit algorithm1_filled(Algorithm1 given, double blocks) {
  const Bytes most = given.host;
  const HostBlocksSplit all = algorithm1(given);
  if (all.act + all.kv <= blocks) {
    return all;
  }
  Bytes low = given.weights, high = most;
  while (high - low > Bytes{1}) {
    given.host = low + (high - low) / 2;
    const HostBlocksSplit split = algorithm1(given);
    (split.act + split.kv <= blocks ? low : high) = given.host;
  }
  given.host = low;
  return algorithm1(given);
}

}  // namespace poise
