#include "planner/forecast/simulate_papers.h"

#include <algorithm>
#include <array>
#include <string>

#include "common/trouble.h"
#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate_grid.h"

namespace poise {
namespace {

struct OptSize {
  std::string_view name;
  std::int32_t layers, hidden, heads;
};
// Zhang et al., "OPT: Open Pre-trained Transformer Language Models", Table 1
constexpr std::array<OptSize, 6> kOptSizes{{{"opt-1.3b", 24, 2048, 32},
                                            {"opt-6.7b", 32, 4096, 32},
                                            {"opt-13b", 40, 5120, 40},
                                            {"opt-30b", 48, 7168, 56},
                                            {"opt-66b", 64, 9216, 72},
                                            {"opt-175b", 96, 12288, 96}}};

// A cost of CAPTURE's systems that ours has not: loaded and regenerated K and V are first merged into an
// Attention buffer (section IV-B), so the device's memory reads them, writes them and reads them again.
constexpr double kMergedAttention = 3;

template <typename Named>
std::string names_of(std::span<const Named> all) {
  std::string names;
  for (const Named& one : all) {
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  return names;
}

}  // namespace

ModelShape opt_shape(std::string_view name) {
  const auto found = std::ranges::find(kOptSizes, name, &OptSize::name);
  if (found == kOptSizes.end()) {
    fail("there is no model {}; there are {}", name, names_of(std::span<const OptSize>(kOptSizes)));
  }
  return {.num_hidden_layers = found->layers,
          .hidden_size = found->hidden,
          .ffn_dim = 4 * found->hidden,
          .num_attention_heads = found->heads,
          .num_key_value_heads = found->heads,
          .head_dim = found->hidden / found->heads,
          .vocab_size = 50272,
          .max_position_embeddings = 2048,
          .position_offset = 2,
          .word_embed_proj_dim = found->hidden,
          .activation_function = Activation::relu,
          .norm_epsilon = 1e-5f,
          .do_layer_norm_before = 1,
          .qkv_bias = 1,
          .output_bias = 1,
          .mlp_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1,
          .learned_positions = 1};
}

ModelShape with_shared_keys(ModelShape shape, std::int32_t key_value_heads) {
  shape.num_key_value_heads = key_value_heads;
  return shape;
}

std::string_view our_policy() {
  const auto all = policies();
  return std::ranges::find(all, "optimal", &PolicyEntry::name) != all.end() ? "optimal" : "hybrid";
}

std::string_view name_of(PaperSystem system) {
  static constexpr std::array<std::string_view, 6> names{"deepspeed",     "flexgen", "act-only",
                                                         "hybrid-static", "hybrid",  "ours"};
  return names[static_cast<std::size_t>(system)];
}

// FlexGen keeps as many layers on the GPU as fit; CAPTURE's GPU memory "is exclusively allocated for
// Activation cache blocks" (section IV-B), and DeepSpeed-Inference brings its weights when they are
// needed: both stream all of them.
SimulatedRun simulate_system(PaperSystem system, const std::string& machine, SimulatedWork work) {
  auto profile = std::make_shared<Profile>(costs_on(machine, work.shape, work.dtype));
  std::string_view policy = name_of(system);
  switch (system) {
    case PaperSystem::deepspeed:
      policy = "row-by-row";
      work.placement = {.resident_layers = 0, .gpu_share = 0};
      break;
    case PaperSystem::flexgen:
      policy = "kv-only";
      work.placement.gpu_share = 0;
      for (Line Profile::*line : {&Profile::load_w, &Profile::load_kv, &Profile::store_kv}) {
        (profile.get()->*line).b /= kFlexGenOfRoof;
      }
      break;
    case PaperSystem::act_only:
    case PaperSystem::hybrid_static:
    case PaperSystem::hybrid:
      profile->attention.b *= kMergedAttention;
      work.placement = {.resident_layers = 0, .gpu_act_alone = true};
      break;
    case PaperSystem::ours:
      policy = our_policy();
      break;
  }
  // The paper's act-only does not use costs.
  const bool knows = policy != "act-only";
  return simulate(*profile, policy, {.profile = knows ? profile : nullptr}, work);
}

std::span<const Simulation> simulations() {
  static constexpr std::array<Simulation, 12> all{{
      {"capture-table3",
       "CAPTURE's Table III: tokens/s while decoding, four models, three systems, RTX 4090",
       capture_table3},
      {"capture-figure1",
       "CAPTURE's Figure 1: what link and GPU do with KV, ACT and hybrid caching", capture_figure1},
      {"capture-figure8",
       "CAPTURE's Figure 8: tokens/s, prompts included, beside FlexGen and DeepSpeed-Inference",
       capture_figure8},
      {"capture-figure9", "CAPTURE's Figure 9: what an iteration brings over the link, OPT-30B",
       capture_figure9},
      {"capture-figure10", "CAPTURE's Figure 10: how busy the GPU is, OPT-30B", capture_figure10},
      {"kvpr-gains", "KVPR's Figure 7: tokens/s over FlexGen's while decoding, A100", kvpr_gains},
      {"kvpr-figure8", "KVPR's Figure 8: what keys and values of 4 bits add, OPT-13B, A100",
       kvpr_figure8},
      {"ours-beyond", "CAPTURE's hybrid and ours on Table III's work, on four machines",
       ours_beyond},
      {"host-cores",
       "link, GPU and host cores: tokens/s over the speeds of link and host cores, three models",
       host_cores},
      {"whole-runs",
       "whole runs, prompts included: how long link and GPU work, and in which iterations neither does",
       whole_runs},
      {"host-grid",
       "every policy beside host cores of 0, 50 and 150 GB/s: tokens/s, prompts included",
       host_grid},
      {"policy-grid",
       "every policy over models, machines, memories and lengths: tokens/s, prompts included",
       policy_grid},
  }};
  return all;
}

const Simulation& simulation_named(std::string_view name) {
  const auto found = std::ranges::find(simulations(), name, &Simulation::name);
  if (found == simulations().end()) {
    fail("there is no simulation {}; there are {}", name, names_of(simulations()));
  }
  return *found;
}

}  // namespace poise
