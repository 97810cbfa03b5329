#include "common/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "common/files/json_file.h"
#include "common/trouble.h"
#include "tests/support/complaint.h"

namespace poise {
namespace {

using testing_support::complaint;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ModelConfig from_text(const std::string& config, const std::string& generation = "null") {
  return model_config_from(parse_json(config, "config.json"), parse_json(generation, "generation"),
                           "config.json");
}

// The OPT family as its config.json files have it.
constexpr const char* kOpt125m =
    R"({"_name_or_path": "facebook/opt-125m", "_remove_final_layer_norm": false, "activation_dropout": 0.0,
        "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 2, "do_layer_norm_before": true, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 12,
        "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
        "transformers_version": "4.21.0.dev0", "use_cache": true, "vocab_size": 50272,
        "word_embed_proj_dim": 768})";
constexpr const char* kOpt350m =
    R"({"architectures": ["OPTForCausalLM"], "do_layer_norm_before": false, "ffn_dim": 4096,
        "hidden_size": 1024, "model_type": "opt", "num_attention_heads": 16,
        "num_hidden_layers": 24, "word_embed_proj_dim": 512, "torch_dtype": "float16"})";

TEST(ModelConfig, Opt125mIsReadAsItIs) {
  const ModelConfig model = from_text(kOpt125m);
  const ModelShape expected{.num_hidden_layers = 12,
                            .hidden_size = 768,
                            .ffn_dim = 3072,
                            .num_attention_heads = 12,
                            .num_key_value_heads = 12,
                            .head_dim = 64,
                            .vocab_size = 50272,
                            .max_position_embeddings = 2048,
                            .position_offset = 2,
                            .word_embed_proj_dim = 768,
                            .activation_function = Activation::relu,
                            .norm_epsilon = 1e-5F,
                            .do_layer_norm_before = 1,
                            .qkv_bias = 1,
                            .output_bias = 1,
                            .mlp_bias = 1,
                            .layer_norm_elementwise_affine = 1,
                            .has_final_layer_norm = 1,
                            .tie_word_embeddings = 1,
                            .learned_positions = 1};
  EXPECT_TRUE(model.shape == expected);
  EXPECT_EQ(model.declared, DType::float16);
  EXPECT_EQ(model.architecture, "OPTForCausalLM");
  EXPECT_THAT(model.eos, ElementsAre(2));
  EXPECT_EQ(model.bos, 2);
  EXPECT_THAT(model.notices, IsEmpty());
}

TEST(ModelConfig, Opt350mNormsAfterwardsAndProjectsItsEmbeddings) {
  const ModelShape shape = from_text(kOpt350m).shape;
  EXPECT_EQ(shape.do_layer_norm_before, 0u);
  EXPECT_EQ(shape.has_final_layer_norm, 0u);
  EXPECT_EQ(shape.word_embed_proj_dim, 512);
  EXPECT_TRUE(shape.projects_embeddings());
}

TEST(ModelConfig, AbsentFieldsHaveTheDefaultsOfTransformers) {
  const ModelConfig model = from_text(R"({"model_type": "opt"})");
  EXPECT_TRUE(model.shape == from_text(kOpt125m).shape);
  EXPECT_EQ(model.declared, std::nullopt);
  EXPECT_THAT(model.eos, ElementsAre(2));
  EXPECT_EQ(
      from_text(R"({"architectures": ["OPTModel"], "hidden_size": 96})").shape.word_embed_proj_dim,
      96);
}

TEST(ModelConfig, EachSwitchReachesTheShape) {
  const auto shape = [](const std::string& field) {
    return from_text(R"({"model_type": "opt", )" + field + "}").shape;
  };
  EXPECT_EQ(shape(R"("_remove_final_layer_norm": true)").has_final_layer_norm, 0u);
  EXPECT_EQ(shape(R"("enable_bias": false)").qkv_bias, 0u);
  EXPECT_EQ(shape(R"("layer_norm_elementwise_affine": false)").layer_norm_elementwise_affine, 0u);
  EXPECT_EQ(shape(R"("tie_word_embeddings": false)").tie_word_embeddings, 0u);
  EXPECT_EQ(shape(R"("word_embed_proj_dim": null)").word_embed_proj_dim, 768);
  EXPECT_EQ(shape(R"("num_hidden_layers": 8.0)").num_hidden_layers, 8);
  EXPECT_EQ(shape(R"("activation_function": "gelu")").activation_function, Activation::gelu);
  EXPECT_EQ(shape(R"("activation_function": "gelu_new")").activation_function,
            Activation::gelu_tanh);
  EXPECT_EQ(shape(R"("activation_function": "gelu_pytorch_tanh")").activation_function,
            Activation::gelu_tanh);
}

TEST(ModelConfig, DtypeMayBeSpelledBothWays) {
  EXPECT_EQ(from_text(R"({"model_type": "opt", "dtype": "bfloat16"})").declared, DType::bfloat16);
  EXPECT_EQ(from_text(R"({"model_type": "opt", "torch_dtype": "float32"})").declared,
            DType::float32);
  EXPECT_EQ(
      from_text(R"({"model_type": "opt", "dtype": "float32", "torch_dtype": "float16"})").declared,
      DType::float32);
  EXPECT_EQ(from_text(R"({"model_type": "opt", "dtype": "auto"})").declared, std::nullopt);
}

TEST(ModelConfig, EosComesFromTheGenerationConfigFirst) {
  constexpr const char* kConfig = R"({"model_type": "opt", "eos_token_id": 7})";
  EXPECT_THAT(from_text(kConfig).eos, ElementsAre(7));
  EXPECT_THAT(from_text(kConfig, R"({"eos_token_id": [5, 3, 5]})").eos, ElementsAre(3, 5));
  EXPECT_THAT(from_text(kConfig, R"({"do_sample": true})").eos, ElementsAre(7));
  EXPECT_THAT(from_text(kConfig, R"({"eos_token_id": null})").eos, IsEmpty());
}

TEST(ModelConfig, AnEosBeyondTheVocabularyIsPassedOverWithANotice) {
  const ModelConfig model =
      from_text(R"({"model_type": "opt", "vocab_size": 5, "eos_token_id": [3, 9]})");
  EXPECT_THAT(model.eos, ElementsAre(3));
  EXPECT_THAT(model.notices, ElementsAre(HasSubstr("9 lies beyond the vocabulary of 5")));
}

TEST(ModelConfig, CodeNamedByAutoMapIsPassedOverWithANotice) {
  const ModelConfig model =
      from_text(R"({"model_type": "opt", "auto_map": {"AutoModel": "evil.py--Model"}})");
  EXPECT_THAT(model.notices, ElementsAre(HasSubstr("auto_map")));
}

TEST(ModelConfig, WhatCannotBeIsRefusedInOneSentenceThatNamesTheField) {
  struct Row {
    std::string field;
    std::string says;
  };
  const std::vector<Row> table{
      {R"("num_hidden_layers": 0)",
       "\"num_hidden_layers\" must be an integer from 1 to 1024, not 0"},
      {R"("num_hidden_layers": 1000000000)", "not 1000000000"},
      {R"("num_hidden_layers": -1)", "not -1"},
      {R"("num_hidden_layers": 1.5)", "not 1.5"},
      {R"("num_hidden_layers": "12")", "not \"12\""},
      {R"("num_hidden_layers": true)", "not true"},
      {R"("num_hidden_layers": [12])", "not a list"},
      {R"("num_hidden_layers": 1e400)", "number overflow"},
      {R"("num_hidden_layers": 18446744073709551617)", "\"num_hidden_layers\" must be"},
      {R"("hidden_size": 0)", "\"hidden_size\" must be"},
      {R"("hidden_size": 100)", "12 attention heads"},
      {R"("hidden_size": 2147483648)", "\"hidden_size\" must be"},
      {R"("hidden_size": 16896)", "\"hidden_size\" must be an integer from 1 to 16384"},
      {R"("hidden_size": 6144)",
       "\"num_attention_heads\" is 12: heads are then 512 wide, and at most 256 is computed"},
      {R"("num_attention_heads": 0)", "\"num_attention_heads\" must be"},
      {R"("num_attention_heads": 7)", "7 attention heads"},
      {R"("num_attention_heads": -12)", "\"num_attention_heads\" must be"},
      {R"("ffn_dim": 0)", "\"ffn_dim\" must be"},
      {R"("ffn_dim": "3072")", "\"ffn_dim\" must be"},
      {R"("vocab_size": 0)", "\"vocab_size\" must be"},
      {R"("vocab_size": 4294967296)", "\"vocab_size\" must be"},
      {R"("max_position_embeddings": 0)", "\"max_position_embeddings\" must be"},
      {R"("max_position_embeddings": -2048)", "\"max_position_embeddings\" must be"},
      {R"("word_embed_proj_dim": 0)", "\"word_embed_proj_dim\" must be"},
      {R"("word_embed_proj_dim": {})", "not an object"},
      {R"("activation_function": "mish")", "is \"mish\"; supported are relu, gelu"},
      {R"("activation_function": 1)", "must be a string, not 1"},
      {R"("do_layer_norm_before": 1)", "must be true or false, not 1"},
      {R"("enable_bias": "yes")", "must be true or false, not \"yes\""},
      {R"("tie_word_embeddings": [])", "must be true or false, not a list"},
      {R"("torch_dtype": "int8")", "must be float32, float16 or bfloat16, not \"int8\""},
      {R"("dtype": 16)", "\"dtype\" must be a string, not 16"},
      {R"("eos_token_id": -1)", "\"eos_token_id\" must be"},
      {R"("eos_token_id": "2")", "\"eos_token_id\" must be"},
      {R"("eos_token_id": [2, "3"])", "a list with \"3\""},
      {R"("bos_token_id": 1.5)", "\"bos_token_id\" must be"},
      {R"("quantization_config": {"bits": 4})", "supported are gptq, awq"},
      {R"("architectures": ["LlamaForCausalLM"])",
       "\"architectures\" is LlamaForCausalLM, but \"model_type\" is opt, not llama"},
      {R"("architectures": ["OPTForSequenceClassification"])", "OPTForSequenceClassification"},
      {R"("architectures": "OPTForCausalLM")", "must be a list of names"},
      {R"("architectures": [3])", "must hold names, not 3"},
      {R"("vocab_size": 5, "vocab_size": 5)", "\"vocab_size\" appears twice"},
  };
  for (const Row& row : table) {
    const std::string sentence =
        complaint([&] { from_text(R"({"model_type": "opt", )" + row.field + "}"); });
    EXPECT_THAT(sentence, HasSubstr(row.says)) << row.field;
    EXPECT_THAT(sentence, HasSubstr("config.json")) << row.field;
  }
  EXPECT_THAT(complaint([] { from_text(R"({"model_type": "bloom"})"); }),
              HasSubstr("model_type bloom is not supported"));
  EXPECT_THAT(complaint([] { from_text("{}"); }), HasSubstr("neither \"architectures\" nor"));
  EXPECT_THAT(complaint([] { from_text("[]"); }), HasSubstr("a JSON object is needed, not a list"));
}

class ModelDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "poise_config_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ / name) << text;
  }
  std::string refusal() {
    return complaint([&] { read_model_config(directory_); });
  }

  std::filesystem::path directory_;
};

TEST_F(ModelDirectory, BothFilesAreReadFromIt) {
  write("config.json", kOpt125m);
  write("generation_config.json", R"({"eos_token_id": 4})");
  EXPECT_THAT(read_model_config(directory_).eos, ElementsAre(4));
}

TEST_F(ModelDirectory, WithoutAConfigItIsNoModel) {
  EXPECT_THAT(refusal(), HasSubstr("has no config.json"));
  EXPECT_THAT(complaint([&] { read_model_config(directory_ / "absent"); }),
              HasSubstr("is not there"));
  write("file", "");
  EXPECT_THAT(complaint([&] { read_model_config(directory_ / "file"); }), HasSubstr("is a file"));
}

TEST_F(ModelDirectory, LinksAreFollowedToAFileAndToNothingElse) {
  write("blob", kOpt125m);
  const auto config = directory_ / "config.json";
  const auto link_to = [&](const char* target) {
    std::filesystem::remove(config);
    std::filesystem::create_symlink(target, config);
  };
  link_to("blob");
  EXPECT_EQ(read_model_config(directory_).shape.hidden_size, 768);
  link_to("nowhere");
  EXPECT_THAT(refusal(), HasSubstr("symbolic link to a file that is not there"));
  link_to("config.json");
  EXPECT_THAT(refusal(), HasSubstr("leads back to itself"));
  link_to("/dev/zero");
  EXPECT_THAT(refusal(), HasSubstr("is a device; a regular file is needed"));
  link_to("/tmp");
  EXPECT_THAT(refusal(), HasSubstr("is a directory"));
}

TEST_F(ModelDirectory, AConfigOfManyMegabytesIsNotEvenRead) {
  write("config.json", "");
  std::filesystem::resize_file(directory_ / "config.json", 1ull << 40);  // sparse
  EXPECT_THAT(refusal(), HasSubstr("1099511627776 bytes long; at most 4194304 are read"));
}

}  // namespace
}  // namespace poise
