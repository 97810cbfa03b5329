#include "common/families/rotary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/files/json_file.h"
#include "common/model_config.h"
#include "common/trouble.h"

namespace poise {
namespace {

// A Llama with heads of 16 numbers whose rotary positions are `rope`.
ModelShape with_rope(const std::string& rope, int positions = 640) {
  const std::string config = R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
      "max_position_embeddings": )" +
                             std::to_string(positions) + R"(, "rope_parameters": )" + rope + "}";
  return model_config_from(parse_json(config, "config.json"), nullptr, "config.json").shape;
}

constexpr const char* kYarn =
    R"({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 10.0,
        "original_max_position_embeddings": 64})";
constexpr const char* kLongrope =
    R"({"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 9.0, 10.0]})";
constexpr const char* kDynamic =
    R"({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 10.0})";

// What ROPE_INIT_FUNCTIONS of transformers 5.24 (PyTorch 2.13, on a CPU) give for the same config.
struct Reference {
  std::string rope;
  int positions;
  std::int32_t set;
  std::vector<float> frequencies;
  double scale;
};

std::vector<Reference> references() {
  return {
      {R"({"rope_type": "default", "rope_theta": 500000.0})",
       640,
       0,
       {1.0F, 0.193922758F, 0.0376060307F, 0.00729266508F, 0.00141421345F, 0.000274248188F,
        5.31829573e-05F, 1.03133852e-05F},
       1},
      {R"({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})",
       640,
       0,
       {0.25F, 0.079056941F, 0.0250000004F, 0.00790569466F, 0.00249999994F, 0.000790569466F,
        0.000250000012F, 7.90569466e-05F},
       1},
      {R"({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64})",
       640,
       0,
       {1.0F, 0.079403013F, 0.00470075384F, 0.000911583134F, 0.000176776681F, 3.42810235e-05F,
        6.64786967e-06F, 1.28917316e-06F},
       1},
      {kYarn,
       640,
       0,
       {1.0F, 0.221359432F, 0.0399999991F, 0.00316227786F, 0.00100000005F, 0.000316227786F,
        9.99999975e-05F, 3.16227779e-05F},
       1.2302585092994045},
      {R"({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 10.0, "truncate": false,
           "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0,
           "attention_factor": 0.75})",
       640,
       0,
       {1.0F, 0.129461423F, 0.00999999978F, 0.00316227786F, 0.00100000005F, 0.000316227786F,
        9.99999975e-05F, 3.16227779e-05F},
       0.75},
      {R"({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 10.0, "mscale": 0.5,
           "mscale_all_dim": 2.0, "original_max_position_embeddings": 64})",
       640,
       0,
       {1.0F, 0.221359432F, 0.0399999991F, 0.00316227786F, 0.00100000005F, 0.000316227786F,
        9.99999975e-05F, 3.16227779e-05F},
       0.7635167823785682},
      {kLongrope,
       640,
       0,
       {1.0F, 0.287479758F, 0.0833333358F, 0.0243252143F, 0.00666666683F, 0.00186016329F,
        0.000500000024F, 0.00014373989F},
       1.2464568514317802},
      {kLongrope,
       640,
       1,
       {1.0F, 0.210818499F, 0.0399999991F, 0.00790569466F, 0.00166666671F, 0.000395284733F,
        0.000111111112F, 3.16227779e-05F},
       1.2464568514317802},
      {kDynamic,  // at lengths up to 64, at 100, at 640
       64,
       0,
       {1.0F, 0.316227764F, 0.100000001F, 0.0316227786F, 0.00999999978F, 0.00316227786F,
        0.00100000005F, 0.000316227786F},
       1},
      {kDynamic,
       64,
       36,
       {1.0F, 0.241372451F, 0.0582606681F, 0.0140625201F, 0.00339430547F, 0.000819291861F,
        0.000197754503F, 4.77324866e-05F},
       1},
      {kDynamic,
       64,
       576,
       {1.0F, 0.166011035F, 0.0275596622F, 0.00457520783F, 0.000759534945F, 0.000126091181F,
        2.09325281e-05F, 3.47503055e-06F},
       1},
  };
}

// Powers are within an ulp or two of PyTorch's, which come from a vector library.
TEST(Rotary, FrequenciesAreThoseOfTransformers) {
  for (const Reference& reference : references()) {
    SCOPED_TRACE(reference.rope + " set " + std::to_string(reference.set));
    const ModelShape shape = with_rope(reference.rope, reference.positions);
    EXPECT_NEAR(shape.rotary.scale, reference.scale, 1e-7);
    const std::vector<float> table = rotary_frequencies(shape);
    ASSERT_EQ(table.size(), static_cast<std::size_t>(frequency_sets(shape)) * 8);
    for (std::size_t i = 0; i < 8; ++i) {
      const float got = table[static_cast<std::size_t>(reference.set) * 8 + i];
      EXPECT_NEAR(got / reference.frequencies[i], 1, 5e-7) << "pair " << i;
    }
  }
}

TEST(Rotary, TheSetOfAPromptsRowsFollowsFromItsLengthAndThatOfLaterRowsFromTheirPosition) {
  const ModelShape dynamic = with_rope(kDynamic, 64);
  EXPECT_EQ(dynamic.max_position_embeddings, 640);
  EXPECT_EQ(frequency_sets(dynamic), 577);
  for (const std::int32_t position : {0, 50, 99}) {
    EXPECT_EQ(frequency_set(dynamic, position, 100), 36) << position;
  }
  EXPECT_EQ(frequency_set(dynamic, 100, 100), 37);
  EXPECT_EQ(frequency_set(dynamic, 63, 10), 0);
  EXPECT_EQ(frequency_set(dynamic, 64, 10), 1);
  EXPECT_EQ(frequency_set(dynamic, 639, 10), 576);
  EXPECT_EQ(frequency_set(dynamic, 645, 10), 576);  // a row behind the last of a block
  const ModelShape longrope = with_rope(kLongrope);
  EXPECT_EQ(frequency_set(longrope, 0, 64), 0);
  EXPECT_EQ(frequency_set(longrope, 0, 65), 1);
  EXPECT_EQ(frequency_set(longrope, 63, 1), 0);
  EXPECT_EQ(frequency_set(longrope, 64, 1), 1);
  EXPECT_TRUE(depends_on_prompt(longrope));
  EXPECT_FALSE(depends_on_prompt(with_rope(kYarn)));
  EXPECT_EQ(frequency_set(with_rope(kYarn), 639, 600), 0);
}

TEST(Rotary, AKindWithoutFrequenciesIsADefectAndNotOneSet) {
  ModelShape shape = with_rope(kYarn);
  shape.rotary.kind = static_cast<RotaryKind>(7);
  EXPECT_THROW(frequency_sets(shape), Defect);
  EXPECT_FALSE(shape.is_sound());
}

}  // namespace
}  // namespace poise
