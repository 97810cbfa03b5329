#include "planner/simulate_papers.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "common/trouble.h"
#include "planner/simulate.h"

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

template <typename Named>
std::string names_of(std::span<const Named> all) {
  std::string names;
  for (const Named& one : all) {
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  return names;
}

// What CAPTURE's systems pay beside ours: loaded and regenerated K and V are first merged into an
// Attention buffer (section IV-B), so the device's memory reads them, writes them and reads them again.
constexpr double kMergedAttention = 3;

std::shared_ptr<const Profile> capture_profile(const ModelShape& shape, DType dtype) {
  auto profile =
      std::make_shared<Profile>(profile_of(machine_named("rtx4090-pcie4"), shape, dtype));
  profile->attention.b *= kMergedAttention;
  return profile;
}

// "using a prompt length of 1920 and a batch size of 128" (section V-E), 128 tokens of answer
// (section V-B), RTX 4090, 882 GB of host memory (section V-A); "GPU memory is exclusively allocated
// for Activation cache blocks" (section IV-B), so all weights are streamed.
nlohmann::ordered_json capture_table3() {
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  for (const std::string_view model : {"opt-6.7b", "opt-13b", "opt-30b", "opt-66b"}) {
    const SimulatedWork work{.shape = opt_shape(model),
                             .requests = 128,
                             .prompt = 1920,
                             .answer = 128,
                             .resident_layers = 0};
    const auto profile = capture_profile(work.shape, work.dtype);
    nlohmann::ordered_json row{{"model", model}};
    for (const std::string_view policy : {"act-only", "hybrid-static", "hybrid"}) {
      row[std::string(policy)] =
          simulate(*profile, policy, {.profile = profile}, work).tokens_per_second;
    }
    json["rows"].push_back(std::move(row));
  }
  return json;
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
          .layer_norm_epsilon = 1e-5f,
          .do_layer_norm_before = 1,
          .enable_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1};
}

std::span<const Simulation> simulations() {
  static constexpr std::array<Simulation, 1> all{{
      {"capture-table3",
       "CAPTURE's Table III: tokens/s while decoding, four models, three systems, RTX 4090",
       capture_table3},
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
