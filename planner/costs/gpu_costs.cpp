// How to interpret a GPU's measured times: how they continue between the points, and which points count.
// For CPU cores and for machines known by constants, points and lines suffice.

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "planner/costs/cost_model.h"

namespace poise {
namespace {

constexpr double kFewRows = 256;  // kernels/cuda/gemm.h

// While copies arrive, each timing event delays a GPU by 5 µs more (cuda_stream.h). That is a tenth of a
// product of few rows, so for these the times without copies count.
std::vector<Point> few_alone(const MeasuredLine& measured) {
  std::vector<Point> points;
  for (Point point : measured.points) {
    const auto alone = std::ranges::find(measured.alone, point.n, &Point::n);
    if (point.n <= kFewRows && alone != measured.alone.end()) {
      point.time = std::min(point.time, alone->time);
    }
    points.push_back(point);
  }
  return points;
}

}  // namespace

double Profile::in_tiles(double rows) const {
  return rows <= kFewRows ? rows : std::ceil(rows / row_tile) * row_tile;
}

Seconds Profile::kv_gen_of(double blocks, double at_once) const {
  if (at_once <= 0 || blocks <= at_once) {
    return kv_gen(blocks);
  }
  const double whole = std::floor(blocks / at_once);
  return kv_gen(at_once) * whole + kv_gen(blocks - whole * at_once);
}

Seconds Profile::absorb_of(double blocks, double rows) const {
  return knows_absorption() ? absorb_rows(rows) + absorb(blocks - rows)
                            : kv_gen(blocks) + attention(blocks);
}

std::shared_ptr<const Profile> deciding_costs(std::shared_ptr<const Profile> profile,
                                              bool absorption) {
  if (!absorption || profile == nullptr || !profile->knows_absorption()) {
    return profile;
  }
  auto deciding = std::make_shared<Profile>(*profile);
  deciding->answers_absorb = true;
  return deciding;
}

Line Profile::gen_of_answers(double rows) const {
  constexpr double kLeast = 1e-3;  // of what absorbing a block costs: a slope above 0
  if (!answers_absorb) {
    return kv_gen;
  }
  return {.a = absorb.a + std::max(0.0, absorb_rows(rows).n - absorb.b * rows),
          .b = std::max(absorb.b - attention.b, kLeast * absorb.b)};
}

Seconds Profile::prefill_of(double pairs, double rows) const {
  // For a measured prompt: its rows and pairs, counted in pairs.
  const auto all = [&](double measured) {
    constexpr double kLongest = double{kProfiledPrompt} * (kProfiledPrompt + 1) / 2;
    const double whole = std::floor(measured / kLongest);
    const double rest = measured - whole * kLongest;
    const double last = std::sqrt(2 * rest + 0.25) - 0.5;
    return measured + row_pairs * (whole * kProfiledPrompt + last);
  };
  const double wanted = pairs + row_pairs * rows;
  if (pairs <= 0 || all(pairs) >= wanted) {
    return prefill(pairs);
  }
  double low = pairs, high = wanted;
  constexpr int kHalvings = 20;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (all(middle) < wanted ? low : high) = middle;
  }
  return prefill(high);
}

Profile::Paces Profile::paces(LinkTime link, Seconds beside, Seconds alone) const {
  if (beside.n <= 0) {
    return {};
  }
  const double faster = std::min(1.0, alone / beside);  // host cores, once the link rests
  const Seconds rested = link.kv + link.rest;
  const Seconds slowed = link.kv * kv_slowdown + link.rest * act_slowdown;
  const double slowdown = rested.n > 0 ? slowed / rested : 1;
  if (beside <= slowed) {  // host cores are done first
    return {.link = 1 + (slowdown - 1) * (beside / slowed), .host = 1};
  }
  return {.link = slowdown, .host = 1 - (1 - faster) * (1 - slowed / beside)};
}

void complete(Profile& profile) {
  constexpr double kRowTile = 256;  // cuBLAS's: 257 rows take what 512 do, 1,799 what 2,048 do
  constexpr double kRowPairs = 90;  // on an H200: half a tile of 64 rows, and 55 for the way
  const bool tiled = profile.kind == DeviceKind::cuda && !profile.measured.empty();
  profile.row_tile = tiled ? kRowTile : 1;
  profile.row_pairs = tiled ? kRowPairs : 0;
  for (const auto& [name, line] :
       {std::pair{"forward", &Profile::forward}, {"qkv", &Profile::qkv}}) {
    const auto products = std::ranges::find(profile.measured, name, &MeasuredLine::name);
    if (tiled && products != profile.measured.end()) {
      (profile.*line).points = rising(few_alone(*products));
    }
  }
  const auto undisturbed = [&](const char* name, std::optional<Line>& line) {
    const auto measured = std::ranges::find(profile.measured, name, &MeasuredLine::name);
    if (measured != profile.measured.end() && measured->alone.size() > 1 &&
        profile.kind == DeviceKind::cuda) {
      line = measured->alone_line;
      line->points = rising(measured->alone);
    }
  };
  profile.attention_undisturbed.reset();
  if (profile.kv_format == KvFormat::plain) {
    undisturbed("attention", profile.attention_undisturbed);
  }
  undisturbed("host_attention", profile.host_attention_undisturbed);
  const auto slowdown = [&](const Line& beside, const Line& rested) -> std::optional<double> {
    if (beside.points.empty() || profile.kind != DeviceKind::cuda) {
      return std::nullopt;
    }
    const Seconds time = rested(beside.points.back().n);
    return time.n > 0 ? std::max(1.0, beside.points.back().time / time) : 1;
  };
  const auto kv = slowdown(profile.load_beside_host, profile.load_kv);
  const auto act = slowdown(profile.load_act_beside_host, profile.load_act);
  profile.kv_slowdown = kv.value_or(act.value_or(1));  // what was not measured is as the other
  profile.act_slowdown = act.value_or(profile.kv_slowdown);
}

}  // namespace poise
