#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "common/families/family.h"
#include "common/files/json_file.h"
#include "common/model_config.h"
#include "common/trouble.h"
#include "common/weight_layout.h"
#include "tests/support/complaint.h"

namespace poise {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing_support::complaint;

ModelConfig read(const std::string& fields) {
  return model_config_from(parse_json("{" + fields + "}", "config.json"), nullptr, "config.json");
}

// Facts of the models' published config.json.
constexpr const char* kLlama31 =
    R"("architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
       "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
       "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
       "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 32,
       "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
       "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
       "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
       "vocab_size": 128256)";
constexpr const char* kMistral7b =
    R"("architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
       "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
       "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
       "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000)";
constexpr const char* kQwen25 =
    R"("architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120,
       "intermediate_size": 27648, "max_position_embeddings": 32768, "max_window_layers": 64,
       "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
       "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
       "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 152064)";
constexpr const char* kQwen3 =
    R"("architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
       "head_dim": 128, "hidden_size": 5120, "intermediate_size": 25600,
       "max_position_embeddings": 40960, "max_window_layers": 64, "num_attention_heads": 64,
       "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
       "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
       "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936)";
constexpr const char* kGpt2 =
    R"("architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
       "bos_token_id": 50256, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
       "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257)";

TEST(Families, Llama31IsReadAsItIs) {
  const ModelConfig model = read(kLlama31);
  const ModelShape& shape = model.shape;
  EXPECT_EQ(model.architecture, "LlamaForCausalLM");
  EXPECT_THAT(model.eos, ElementsAre(128001, 128008, 128009));
  EXPECT_EQ(model.bos, 128000);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.kv_dim(), 1024);
  EXPECT_EQ(shape.fc1_dim(), 2 * 14336);
  EXPECT_EQ(shape.norm, Norm::rms);
  EXPECT_EQ(shape.norm_epsilon, 1e-5F);
  EXPECT_EQ(shape.activation_function, Activation::silu);
  EXPECT_EQ(shape.qkv_bias + shape.output_bias + shape.mlp_bias, 0u);
  EXPECT_EQ(shape.learned_positions, 0u);
  EXPECT_EQ(shape.rotary.kind, RotaryKind::llama3);
  EXPECT_EQ(shape.rotary.original_max_position_embeddings, 8192);
  EXPECT_EQ(shape.max_position_embeddings, 131072);
  // As published: 8,030,261,248 parameters.
  EXPECT_NEAR(static_cast<double>(weight_layout(shape, DType::bfloat16).total().n) / 2,
              8'030'261'248.0, 1e6);
}

TEST(Families, MistralHasItsWindowOnAllLayersUnlessItIsNull) {
  const ModelShape shape = read(kMistral7b).shape;
  EXPECT_EQ(shape.window({0}), 4096);
  EXPECT_EQ(shape.window({31}), 4096);
  EXPECT_EQ(read(R"("model_type": "mistral", "sliding_window": null)").shape.window({0}), 0);
  EXPECT_EQ(read(R"("model_type": "mistral")").shape.window({0}), 4096);
  // Mistral-Nemo: heads that are not hidden_size / heads wide.
  const ModelShape nemo = read(R"("model_type": "mistral", "hidden_size": 5120, "head_dim": 128,
                                  "num_attention_heads": 32, "sliding_window": null)")
                              .shape;
  EXPECT_EQ(nemo.q_dim(), 4096);
}

TEST(Families, Qwen2HasBiasesOnQueriesKeysAndValuesAlone) {
  const ModelShape shape = read(kQwen25).shape;
  EXPECT_EQ(shape.qkv_bias, 1u);
  EXPECT_EQ(shape.output_bias + shape.mlp_bias, 0u);
  EXPECT_EQ(shape.sliding_window, 0);
  EXPECT_THAT(read(kQwen25).eos, IsEmpty());
}

TEST(Families, QwensWindowsBeginAtALayer) {
  const std::string base =
      R"("model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 100)";
  const ModelShape from_2 =
      read(base + R"(, "use_sliding_window": true, "max_window_layers": 2)").shape;
  EXPECT_EQ(from_2.window({1}), 0);
  EXPECT_EQ(from_2.window({2}), 100);
  const std::string types =
      R"(, "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"])";
  EXPECT_EQ(read(base + types + R"(, "use_sliding_window": true)").shape.window({0}), 100);
  EXPECT_EQ(read(base + types + R"(, "use_sliding_window": true)").shape.window({3}), 0);
  EXPECT_EQ(read(base + types).shape.window({0}), 0);
}

TEST(Families, Qwen3NormsItsHeads) {
  const ModelShape shape = read(kQwen3).shape;
  EXPECT_EQ(shape.qk_norm, 1u);
  EXPECT_EQ(shape.q_dim(), 8192);
  EXPECT_EQ(shape.rotary.theta, 1e6F);
  EXPECT_EQ(shape.rotary.kind, RotaryKind::plain);
  EXPECT_EQ(read(R"("model_type": "qwen3")").shape.head_dim, 128);
}

TEST(Families, Gpt2IsReadAsItIs) {
  const ModelConfig model = read(kGpt2);
  EXPECT_EQ(model.shape.ffn_dim, 3072);
  EXPECT_EQ(model.shape.position_offset, 0);
  EXPECT_EQ(model.shape.activation_function, Activation::gelu_tanh);
  EXPECT_EQ(model.shape.norm, Norm::layer_norm);
  EXPECT_FALSE(model.shape.turns_heads());
  EXPECT_THAT(model.eos, ElementsAre(50256));
  EXPECT_EQ(read(R"("model_type": "gpt2", "n_inner": 100)").shape.ffn_dim, 100);
}

TEST(Families, RotaryFieldsAreReadInEachOfTheirForms) {
  const auto rotary = [](const std::string& fields) {
    return read(R"("model_type": "llama", "num_attention_heads": 64, )" + fields).shape.rotary;
  };
  const RotaryShape linear =
      rotary(R"("rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2})");
  EXPECT_EQ(linear.kind, RotaryKind::linear);
  EXPECT_EQ(linear.theta, 5000);
  EXPECT_TRUE(linear == rotary(R"("rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                      "rope_theta": 5000.0})"));
  EXPECT_TRUE(linear == rotary(R"("rope_theta": 7, "rope_parameters": {"rope_type": "linear",
                                    "type": "yarn", "factor": 2.0, "rope_theta": 5000.0})"));
  EXPECT_EQ(rotary(R"("rope_scaling": {}, "rope_parameters": {"rope_theta": 9})").theta, 9);
  EXPECT_EQ(rotary(R"("rope_scaling": null)").theta, 10000);
}

TEST(Families, WhatIsNotThereIsRefusedInASentence) {
  struct Row {
    std::string fields, says;
  };
  const std::string longrope =
      R"("model_type": "llama", "rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": )";
  const std::vector<Row> table{
      {R"("model_type": "gemma2")",
       "model_type gemma2 is not supported; supported are OPTForCausalLM"},
      {R"("architectures": ["MixtralForCausalLM"], "model_type": "mixtral")",
       "the architecture MixtralForCausalLM is not supported"},
      {R"("architectures": ["LlamaForCausalLM"], "model_type": "opt")",
       "\"architectures\" is LlamaForCausalLM, but \"model_type\" is opt, not llama"},
      {R"("model_type": "llama", "num_experts": 8)", "layers with experts are not supported"},
      {R"("model_type": "llama", "num_key_value_heads": 5)", "does not divide 32"},
      {R"("model_type": "llama", "head_dim": 65)", "have an even width of at most 256"},
      {R"("model_type": "llama", "head_dim": 512)", "have an even width of at most 256"},
      {R"("model_type": "llama", "max_position_embeddings": 2000000)", "rotary positions reach to"},
      {R"("model_type": "llama", "partial_rotary_factor": 0.5)",
       "rotated in part are not supported"},
      {R"("model_type": "llama", "rope_scaling": {"rope_type": "mrope"})",
       "is \"mrope\"; supported are default, linear, dynamic, yarn, longrope and llama3"},
      {R"("model_type": "llama", "rope_scaling": {"type": "linear"})", "\"factor\" is missing"},
      {R"("model_type": "llama", "rope_scaling": {"type": "linear", "factor": "2"})",
       "\"factor\" must be"},
      {R"("model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4,
          "high_freq_factor": 4})",
       "not above \"low_freq_factor\""},
      {R"("model_type": "llama", "rope_parameters": {"full_attention": {"rope_theta": 5}})",
       "differ by layer are not supported"},
      {longrope + "[1]}", "must be a list of 64 numbers"},
      {R"("model_type": "llama", "hidden_act": "mish")", "is \"mish\"; supported are relu"},
      {R"("model_type": "llama", "attn_logit_softcapping": 50.0)",
       "capped scores are not supported"},
      {R"("model_type": "llama", "final_logit_softcapping": 30.0)",
       "capped logits are not supported"},
      {R"("model_type": "mistral", "use_attention_sinks": true)",
       "attention sinks are not supported"},
      {R"("model_type": "qwen3", "num_sink_tokens": 4)", "attention sinks are not supported"},
      {R"("model_type": "llama", "clip_qkv": 8.0)", "clipped queries, keys and values are not"},
      {R"("model_type": "llama", "no_rope_layers": [1, 0])", "layers without positions are not"},
      {R"("model_type": "llama", "attention_chunk_size": 8192)", "attention within chunks is not"},
      {R"("model_type": "llama", "attention_multiplier": 0.5)", "factors of this kind are not"},
      {R"("model_type": "llama", "layer_types": ["full_attention"])", "a list of 32 names"},
      {R"("model_type": "llama", "num_hidden_layers": 1, "layer_types": ["chunked_attention"])",
       "not \"chunked_attention\""},
      {R"("model_type": "mistral", "layer_types": ["full_attention"])",
       "windows on some layers alone are not this family's"},
      {R"("model_type": "qwen2", "layer_types": ["full_attention"])", "a list of 32 names"},
      {R"("model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["linear_attention"])",
       "not \"linear_attention\""},
      {R"("model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true)", "the layer's number"},
      {R"("model_type": "gpt2", "n_head": 7)", "7 attention heads (\"n_head\")"},
  };
  for (const Row& row : table) {
    EXPECT_THAT(complaint([&] { read(row.fields); }), HasSubstr(row.says)) << row.fields;
  }
}

// Every weight that some model of the family has must be filled, whole and once.
TEST(Families, EachNamesTheTensorsOfItsWeights) {
  for (const Family* family : families()) {
    SCOPED_TRACE(family->architecture);
    std::set<Weight> whole, upper, lower;
    for (const std::span<const TensorName> names : {family->outer, family->layer}) {
      for (const TensorName& name : names) {
        auto& filled = name.rows == RowsFilled::all     ? whole
                       : name.rows == RowsFilled::upper ? upper
                                                        : lower;
        EXPECT_TRUE(filled.insert(name.weight).second) << name.name;
      }
    }
    EXPECT_TRUE(upper == lower);
    const ModelShape shape = read(fmt::format("\"model_type\": \"{}\"", family->model_type)).shape;
    const WeightLayout layout = weight_layout(shape, DType::float16);
    for (const Slab* slab : {&layout.outer, &layout.layer}) {
      for (const WeightEntry& entry : slab->entries) {
        EXPECT_TRUE(entry.weight == Weight::head ||
                    whole.contains(entry.weight) != upper.contains(entry.weight))
            << name_of(entry.weight);
      }
    }
  }
}

}  // namespace
}  // namespace poise
