#include "planner/links/status.h"

#include <spdlog/spdlog.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/files/replace_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr double kInterval = 0.5;
constexpr std::size_t kAnswers = 16;  // kept for users that have not read them yet

double to_four_places(double value) { return std::round(value * 1e4) / 1e4; }

double share(double part, double whole) { return whole > 0 ? to_four_places(part / whole) : 0; }

double seconds_of(std::uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

double busy(std::uint64_t ns, Seconds elapsed) {
  return share(static_cast<double>(ns) * 1e-9, elapsed.n);
}

}  // namespace

void RunStatus::answer_wish() {
  policy_answers.push_back({.serial = policy_serial,
                            .policy = policy,
                            .since = policy_since,
                            .refusal = policy_refusal,
                            .held_back = policy_held_back});
  if (policy_answers.size() > kAnswers) {
    policy_answers.erase(policy_answers.begin());
  }
}

std::string to_json(const RunStatus& status) {
  const double seconds = status.elapsed.n;
  const double rate = seconds > 0 ? static_cast<double>(status.generated_tokens) / seconds : 0;
  nlohmann::ordered_json json{
      {"run_id", status.run_id},
      {"state", status.state},
      {"measured", status.measured},
      {"requests", status.requests},
      {"done", status.done},
      {"errors", status.errors},
      {"prompt_tokens", status.prompt_tokens},
      {"generated_tokens", status.generated_tokens},
      {"elapsed_seconds", to_four_places(seconds)},
      {"tokens_per_second", to_four_places(rate)},
      {"running", status.running},
      {"waiting", status.waiting},
      {"preemptions", status.preemptions},
      {"iteration", status.iteration},
      {"suspects", status.suspects},
      {"pids", {{"planner", status.planner_pid}, {"gpu_executor", status.executor_pid}}},
      {"policy", status.policy},
      {"policy_since", status.policy_since},
      {"policy_serial", status.policy_serial},
      {"policy_refusal", status.policy_refusal},
      {"policy_answers", nlohmann::ordered_json::array()},
      {"device", status.device},
      {"blocks",
       {{"act", status.act_blocks}, {"kv", status.kv_blocks}, {"free", status.free_blocks}}},
      {"pools", nlohmann::ordered_json::array()},
      {"iteration_tokens", status.iteration_tokens.json()},
      {"token_seconds", status.token_seconds.json()},
      {"layers", status.layers},
      {"resident_layers", status.resident_layers},
      {"host_weights_bytes", status.host_weights.n},
      {"host_pool_bytes", status.host_pool.n},
      {"device_bytes", status.device_memory.n},
      {"link_bytes",
       {{"weights", status.executor.weights},
        {"kv", status.executor.kv},
        {"act", status.executor.act},
        {"stores", status.executor.stores}}},
      {"busy",
       {{"copy_in", busy(status.executor.copy_in_busy_ns, status.elapsed)},
        {"compute", busy(status.executor.compute_busy_ns, status.elapsed)},
        {"copy_out", busy(status.executor.copy_out_busy_ns, status.elapsed)}}},
      {"busy_seconds",
       {{"copy_in", seconds_of(status.executor.copy_in_busy_ns)},
        {"compute", seconds_of(status.executor.compute_busy_ns)},
        {"copy_out", seconds_of(status.executor.copy_out_busy_ns)}}},
      {"planner",
       {{"planning_share", share(status.planning_time.n, seconds)},
        {"messages_share", share(status.message_time.n, seconds)},
        {"answers_share", share(status.answer_time.n, seconds)}}},
  };
  for (const BlocksOf& pool : status.pools) {
    json["pools"].push_back({{"kind", pool.kind},
                             {"place", pool.place},
                             {"total", pool.total},
                             {"taken", pool.taken}});
  }
  for (const PolicyAnswer& answer : status.policy_answers) {
    json["policy_answers"].push_back({{"serial", answer.serial},
                                      {"policy", answer.policy},
                                      {"since", answer.since},
                                      {"refusal", answer.refusal},
                                      {"held_back", answer.held_back}});
  }
  if (status.prediction) {
    const Prediction::Figures& both = *status.prediction;
    const auto each = [&](Seconds all) {
      return both.decoding > 0 ? all.n / static_cast<double>(both.decoding) : 0;
    };
    const auto tokens_per_second = [&](Seconds all) {
      return all.n > 0 ? to_four_places(static_cast<double>(status.generated_tokens) / all.n) : 0;
    };
    json["predicted"] = {{"decode_iteration_seconds", each(both.decode_predicted)},
                         {"tokens_per_second", tokens_per_second(both.predicted)}};
    json["measured"] = {{"decode_iteration_seconds", each(both.decode_measured)},
                        {"tokens_per_second", tokens_per_second(both.measured)}};
    json["decode_iterations"] = both.decoding;
  }
  if (status.balance && status.balance->all().iterations > 0) {
    json["balance"] = json_of(*status.balance, status.facts);
  }
  if (status.state == "running" && rate > 0) {
    json["seconds_left"] = to_four_places(static_cast<double>(status.tokens_left) / rate);
  }
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

StatusFile::StatusFile(const std::filesystem::path& run_dir) : path_(run_dir / "status.json") {}

bool StatusFile::due(Seconds now) const { return last_.n < 0 || now.n - last_.n >= kInterval; }

void StatusFile::write(const RunStatus& status, Seconds now, bool always) {
  if (!always && !due(now)) {
    return;
  }
  last_ = now;
  try {
    replace_file(path_, to_json(status), {.durable = false});
    complained_ = false;
  } catch (const Failure& failure) {
    if (!std::exchange(complained_, true)) {
      spdlog::warn("{}; the run goes on, its status is old", failure.what());
    }
  }
}

}  // namespace poise
