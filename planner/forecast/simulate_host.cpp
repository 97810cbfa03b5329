// The three resources against each other: which policy is best where link and host cores have these speeds.

#include <fmt/core.h>

#include <array>
#include <memory>
#include <string>

#include "common/trouble.h"
#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

constexpr std::array<const char*, 3> kHostModels{"opt-6.7b", "opt-13b", "opt-30b"};
constexpr std::array<double, 3> kLinkSpeeds{12.5, 25, 50};      // GB/s
constexpr std::array<double, 4> kHostSpeeds{25, 50, 100, 200};  // GB/s that host cores attend
constexpr std::array<const char*, 3> kOnDevice{"kv-only", "act-only", "hybrid"};
constexpr const char* kOnHost = "host-kv";
constexpr std::int64_t kGpuGib = 24, kHostGib = 256;

double speed_of(const Machine& machine, std::string_view policy, const SimulatedWork& work) {
  const auto profile = std::make_shared<const Profile>(profile_of(machine, work.shape, work.dtype));
  try {
    return simulate(*profile, policy, {.profile = profile}, work).tokens_per_second;
  } catch (const Failure&) {  // it has no room
    return 0;
  }
}

}  // namespace

nlohmann::ordered_json host_cores(const SimulatedOn& on) {
  const std::string name = on.value_or("rtx4090-pcie4");
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  for (const char* model : kHostModels) {
    const SimulatedWork work{
        .shape = opt_shape(model), .requests = 64, .prompt = 1024, .answer = 12};
    for (const double link : kLinkSpeeds) {
      Machine machine = find_machine(name).machine;
      machine.link = machine.back = link;
      machine.gpu_memory = kGiB * kGpuGib;
      machine.host_memory = kGiB * kHostGib;
      std::array<double, kOnDevice.size()> speeds{};  // do not depend on host cores
      for (std::size_t i = 0; i < kOnDevice.size(); ++i) {
        speeds[i] = speed_of(machine, kOnDevice[i], work);
      }
      for (const double host : kHostSpeeds) {
        machine.host = host;
        nlohmann::ordered_json row{{"model", model}, {"link_gbps", link}, {"host_gbps", host}};
        std::string best = kOnHost;
        double most = speed_of(machine, kOnHost, work);
        const double on_host = most;
        for (std::size_t i = 0; i < kOnDevice.size(); ++i) {
          row[kOnDevice[i]] = speeds[i];
          best = speeds[i] > most ? kOnDevice[i] : best;
          most = std::max(speeds[i], most);
        }
        row[kOnHost] = on_host;
        row["best"] = best;
        json["rows"].push_back(std::move(row));
      }
    }
  }
  json["notes"] = {
      fmt::format("tokens/s while every request decodes: 64 requests of 1,024 tokens on {}'s GPU, "
                  "{} GiB of it and {} GiB of host memory; 0: no room",
                  name, kGpuGib, kHostGib),
      "host_gbps: bytes of keys and values a second that host cores attend where they lie"};
  return json;
}

}  // namespace poise
