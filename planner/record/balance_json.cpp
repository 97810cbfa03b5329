#include <cmath>
#include <utility>

#include "common/files/json.h"
#include "planner/record/balance.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

double to_microseconds(double value) { return std::round(value * 1e6) / 1e6; }

}  // namespace

Json json_of(const BalanceSums& sums) {
  Json json{
      {"t_pcie", to_microseconds(sums.pcie.n)},
      {"t_compute", to_microseconds(sums.compute.n)},
      {"t_stores", to_microseconds(sums.back.n)},
      {"compute_waits",
       {{"weights", to_microseconds(sums.for_weights.n)},
        {"blocks", to_microseconds(sums.for_blocks.n)},
        {"rows", to_microseconds(sums.for_rows.n)}}},
      {"link_waits", {{"buffers", to_microseconds(sums.for_buffers.n)}}},
      {"bytes",
       {{"weights", sums.weights}, {"kv", sums.kv}, {"act", sums.act}, {"stores", sums.stores}}},
      {"f_b", to_microseconds(sums.mean_f_b())}};
  if (sums.host.n > 0) {
    json["t_host"] = to_microseconds(sums.host.n);
    json["compute_waits"]["host"] = to_microseconds(sums.for_host.n);
    json["host_bytes"] = {{"read", sums.host_read}, {"rows", sums.host_rows}};
  }
  if (sums.wall.n > 0) {
    const auto share = [&](Seconds part) { return to_microseconds(part.n / sums.wall.n); };
    json["seconds"] = to_microseconds(sums.wall.n);
    json["iterations"] = sums.iterations;
    json["mini_batches"] = sums.mini_batches;
    json["link_busy"] = share(sums.pcie);
    json["compute_busy"] = share(sums.compute);
    if (sums.host.n > 0) {
      json["host_busy"] = share(sums.host);
    }
    // Neither at work nor waiting for the other: no order was there.
    json["link_without_orders"] = std::max(0.0, share(sums.wall - sums.pcie - sums.for_buffers));
    json["compute_without_orders"] =
        std::max(0.0, share(sums.wall - sums.compute - sums.compute_waits()));
  }
  return json;
}

Json json_of(const Balance& balance, const BalanceFacts& facts) {
  Json json{{"words", words(balance, facts)}};
  if (facts.without_reports > 0) {
    json["without_reports"] = facts.without_reports;
    if (balance.all().iterations == 0) {
      return json;
    }
  }
  json["whole"] = json_of(balance.all());
  json["generating"] = json_of(balance.decode());
  json["last"] = Json::array();
  for (const Balance::Iteration& one : balance.last()) {
    Json iteration{{"iteration", one.kind.number}, {"generates_only", one.kind.decodes}};
    iteration.update(json_of(one.sums));
    json["last"].push_back(std::move(iteration));
  }
  return json;
}

}  // namespace poise
