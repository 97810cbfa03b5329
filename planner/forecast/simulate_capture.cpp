// CAPTURE's evaluation (ICCD 2025, section V): OPT on an RTX 4090 with PCIe 4 and 882 GB of host memory.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate_papers.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kMachine = "rtx4090-pcie4";
constexpr std::string_view kModels[] = {"opt-6.7b", "opt-13b", "opt-30b", "opt-66b"};
// Figures 8 to 10 are over "varying input prompt lengths", which the text does not name.
constexpr std::int32_t kPrompts[] = {512, 1024, 1920};

SimulatedWork work_of(std::string_view model, std::int32_t requests, std::int32_t prompt) {
  return {.shape = opt_shape(model), .requests = requests, .prompt = prompt, .answer = 128};
}

Json result(Json rows, std::vector<std::string> notes) {
  return {{"rows", std::move(rows)}, {"notes", std::move(notes)}};
}

std::string flexgen_note() {
  return fmt::format(
      "flexgen: kv-only, as many layers on the GPU as fit, its link at {:.0f} % of the roof "
      "(measured: 59 "
      "to 76 % on an H200)",
      100 * kFlexGenOfRoof);
}

// Of ratios.
class Mean {
 public:
  void add(double ratio) {
    sum_ += std::log(ratio);
    ++count_;
  }
  double value() const { return std::exp(sum_ / count_); }

 private:
  double sum_ = 0;
  int count_ = 0;
};

const char* kind_of(VirtualSpan::Kind kind) {
  switch (kind) {
    case VirtualSpan::Kind::load:
      return "load";
    case VirtualSpan::Kind::weights:
      return "weights";
    case VirtualSpan::Kind::kv_gen:
      return "kv gen";
    case VirtualSpan::Kind::attention:
      return "attention";
    case VirtualSpan::Kind::products:
      return "products";
    case VirtualSpan::Kind::head:
      return "head";
    case VirtualSpan::Kind::store:
      return "store";
    case VirtualSpan::Kind::host:
      return "host attention";
  }
  return "";
}

bool on_link(VirtualSpan::Kind kind) {
  return kind == VirtualSpan::Kind::load || kind == VirtualSpan::Kind::weights;
}

// What the streams do while two layers in the middle of the model are computed.
Json timeline_of(const SimulatedRun& run, std::uint32_t layer) {
  Seconds begin{INFINITY}, end{};
  for (const VirtualSpan& span : run.spans) {
    const bool computed = !on_link(span.kind) && span.kind != VirtualSpan::Kind::store;
    if (computed && span.layer >= layer && span.layer < layer + 2) {
      begin = std::min(begin, span.begin);
      end = std::max(end, span.end);
    }
  }
  Json spans = Json::array();
  for (const VirtualSpan& span : run.spans) {
    if (span.end > begin && span.begin < end && span.kind != VirtualSpan::Kind::store) {
      const bool host = span.kind == VirtualSpan::Kind::host;
      spans.push_back({{"stream", on_link(span.kind) ? "PCIe"
                                  : host             ? "host"
                                                     : "GPU"},
                       {"kind", kind_of(span.kind)},
                       {"begin_ms", (std::max(span.begin, begin) - begin).n * 1e3},
                       {"end_ms", (std::min(span.end, end) - begin).n * 1e3}});
    }
  }
  return spans;
}

}  // namespace

// "using a prompt length of 1920 and a batch size of 128" (section V-E), 128 tokens of answer
// (section V-B), RTX 4090, 882 GB of host memory (section V-A).
Json capture_table3(const SimulatedOn& on) {
  const std::string machine = on.value_or(kMachine);
  Json rows = Json::array();
  for (const std::string_view model : kModels) {
    Json row{{"model", model}};
    for (const auto system :
         {PaperSystem::act_only, PaperSystem::hybrid_static, PaperSystem::hybrid}) {
      row[std::string(name_of(system))] =
          simulate_system(system, machine, work_of(model, 128, 1920)).tokens_per_second;
    }
    rows.push_back(std::move(row));
  }
  return result(
      std::move(rows),
      {"tokens/s while every request decodes; all weights streamed; K and V merged before "
       "attention, as CAPTURE does"});
}

// The figure is a sketch without numbers; this is OPT-30B's, 32 requests of 1,920 tokens.
Json capture_figure1(const SimulatedOn& on) {
  const std::string machine = on.value_or(kMachine);
  Json rows = Json::array(), timelines = Json::object();
  const std::pair<const char*, PaperSystem> systems[] = {
      {"kv", PaperSystem::ours}, {"act", PaperSystem::act_only}, {"hybrid", PaperSystem::hybrid}};
  for (const auto& [name, system] : systems) {
    SimulatedWork work = work_of("opt-30b", 32, 1920);
    work.traced = true;
    work.placement.resident_layers = 0;
    const auto profile = std::make_shared<const Profile>(costs_on(machine, work.shape, work.dtype));
    const SimulatedRun run = system == PaperSystem::ours
                                 ? simulate(*profile, "kv-only", {.profile = profile}, work)
                                 : simulate_system(system, machine, work);
    rows.push_back({{"cache", name},
                    {"tokens_per_second", run.tokens_per_second},
                    {"link_idle", std::max(0.0, 1 - run.link_busy)},
                    {"gpu_idle", std::max(0.0, 1 - run.compute_busy)}});
    timelines[name] = timeline_of(run, 20);
  }
  Json json =
      result(std::move(rows), {"OPT-30B, 32 requests of 1,920 tokens, all weights streamed"});
  json["timelines"] = std::move(timelines);
  return json;
}

Json capture_figure8(const SimulatedOn& on) {
  const std::string machine = on.value_or(kMachine);
  constexpr PaperSystem kSystems[] = {PaperSystem::deepspeed, PaperSystem::flexgen,
                                      PaperSystem::act_only, PaperSystem::hybrid,
                                      PaperSystem::ours};
  Json rows = Json::array(), means = Json::array();
  Mean over_flexgen, over_act, deepspeed_of_flexgen, deepspeed_of_hybrid;
  for (const std::string_view model : kModels) {
    Mean model_over_flexgen, model_over_act;
    for (const std::int32_t prompt : kPrompts) {
      Json row{{"model", model}, {"prompt", prompt}};
      std::array<double, 6> speed{};
      for (const PaperSystem system : kSystems) {
        SimulatedWork work = work_of(model, 128, prompt);
        work.to_the_end = true;
        speed[static_cast<std::size_t>(system)] =
            simulate_system(system, machine, work).tokens_per_second;
        row[std::string(name_of(system))] = speed[static_cast<std::size_t>(system)];
      }
      const auto of = [&](PaperSystem one, PaperSystem other) {
        return speed[static_cast<std::size_t>(one)] / speed[static_cast<std::size_t>(other)];
      };
      for (Mean* mean : {&over_flexgen, &model_over_flexgen}) {
        mean->add(of(PaperSystem::hybrid, PaperSystem::flexgen));
      }
      for (Mean* mean : {&over_act, &model_over_act}) {
        mean->add(of(PaperSystem::hybrid, PaperSystem::act_only));
      }
      deepspeed_of_flexgen.add(of(PaperSystem::deepspeed, PaperSystem::flexgen));
      deepspeed_of_hybrid.add(of(PaperSystem::deepspeed, PaperSystem::hybrid));
      rows.push_back(std::move(row));
    }
    means.push_back({{"model", model},
                     {"hybrid_over_flexgen", model_over_flexgen.value()},
                     {"hybrid_over_act_only", model_over_act.value()}});
  }
  means.push_back({{"model", "all"},
                   {"hybrid_over_flexgen", over_flexgen.value()},
                   {"hybrid_over_act_only", over_act.value()},
                   {"deepspeed_of_flexgen", deepspeed_of_flexgen.value()},
                   {"deepspeed_of_hybrid", deepspeed_of_hybrid.value()}});
  Json json = result(
      std::move(rows),
      {"all tokens answered over all time, prompts included; 128 requests, 128 tokens each",
       flexgen_note(), "deepspeed: row-by-row, all weights streamed, the link at its roof",
       fmt::format("ours: {}", our_policy()),
       fmt::format("hybrid over flexgen {:.2f} (paper 2.19), over act-only {:.2f} (paper 1.35); "
                   "deepspeed {:.0f} % of flexgen (paper 29 %), {:.0f} % of hybrid (paper 13 %)",
                   over_flexgen.value(), over_act.value(), 100 * deepspeed_of_flexgen.value(),
                   100 * deepspeed_of_hybrid.value())});
  json["means"] = std::move(means);
  return json;
}

Json capture_figure9(const SimulatedOn& on) {
  const std::string machine = on.value_or(kMachine);
  Json rows = Json::array();
  for (const std::int32_t requests : {32, 64}) {
    for (const std::int32_t prompt : kPrompts) {
      Json row{{"requests", requests}, {"prompt", prompt}};
      double total[2] = {};
      for (const PaperSystem system : {PaperSystem::flexgen, PaperSystem::hybrid}) {
        const SimulatedRun run =
            simulate_system(system, machine, work_of("opt-30b", requests, prompt));
        const std::string name(name_of(system));
        const double gigabytes = 1e-9 / static_cast<double>(run.counted);
        row[name + "_kv"] = run.loaded.kv * gigabytes;
        row[name + "_act"] = run.loaded.act * gigabytes;
        row[name + "_weights"] = run.loaded.weights * gigabytes;
        total[system == PaperSystem::hybrid ? 1 : 0] =
            run.loaded.kv + run.loaded.act + run.loaded.weights;
      }
      row["reduction"] = total[0] / total[1];
      rows.push_back(std::move(row));
    }
  }
  return result(
      std::move(rows),
      {"GB from host to GPU in an iteration of OPT-30B; the reduction is of all, weights too",
       "paper: up to 1.27 times less with 32 requests, 1.38 with 64"});
}

Json capture_figure10(const SimulatedOn& on) {
  const std::string machine = on.value_or(kMachine);
  Json rows = Json::array();
  for (const std::int32_t requests : {32, 64, 128}) {
    for (const std::int32_t prompt : kPrompts) {
      Json row{{"requests", requests}, {"prompt", prompt}};
      for (const PaperSystem system : {PaperSystem::flexgen, PaperSystem::hybrid}) {
        SimulatedWork work = work_of("opt-30b", requests, prompt);
        work.to_the_end = true;
        row[std::string(name_of(system))] = simulate_system(system, machine, work).compute_busy;
      }
      row["ratio"] = row["hybrid"].get<double>() / row["flexgen"].get<double>();
      rows.push_back(std::move(row));
    }
  }
  return result(
      std::move(rows),
      {"share of the time in which the GPU computes, prompts included, OPT-30B; its time at full "
       "speed: "
       "kernels that run slower count as longer in the paper",
       flexgen_note(),
       "paper, from 32 to 128 requests: FlexGen 8.2 to 12.6 %, CAPTURE 35.6 to 78.2 %; on "
       "average 7.39 times as busy"});
}

Json ours_beyond(const SimulatedOn& on) {
  Json rows = Json::array();
  std::vector<std::string> all{"rtx4090-pcie4", "a100-pcie4", "h200-pcie5", "l4-pcie4"};
  for (const std::string& machine : on ? std::vector{*on} : all) {
    for (const std::string_view model : {"opt-6.7b", "opt-13b"}) {
      const SimulatedWork work = work_of(model, 64, 1024);
      const double flexgen = simulate_system(PaperSystem::flexgen, machine, work).tokens_per_second;
      const double hybrid = simulate_system(PaperSystem::hybrid, machine, work).tokens_per_second;
      const double ours = simulate_system(PaperSystem::ours, machine, work).tokens_per_second;
      rows.push_back({{"machine", machine},
                      {"model", model},
                      {"flexgen", flexgen},
                      {"hybrid", hybrid},
                      {"ours", ours},
                      {"over_hybrid", ours / hybrid}});
    }
  }
  return result(std::move(rows),
                {"tokens/s while every request decodes: 64 requests of 1,024 tokens",
                 flexgen_note(), fmt::format("ours: {}", our_policy())});
}

}  // namespace poise
