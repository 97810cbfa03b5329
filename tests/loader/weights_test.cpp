// From files to the weight segment: that every number arrives where it belongs, whatever the
// checkpoint's form, and that what does not fit the config is refused.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>

#include "common/trouble.h"
#include "common/weight_layout.h"
#include "loader/model_on_disk.h"
#include "loader/weight_fill.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Loaded {
  std::vector<std::byte> segment;
  Digest digest;
};

Loaded load(const ModelOnDisk& model, std::size_t threads = 2) {
  Loaded loaded{.segment =
                    std::vector<std::byte>(static_cast<std::size_t>(model.layout.total().n))};
  std::atomic<std::uint64_t> bytes{0};
  WeightFill fill(*model.source, loaded.segment, threads, bytes);
  while (!fill.done()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(static_cast<std::int64_t>(bytes.load()), fill.total().n);
  loaded.digest = model_fingerprint(model.config, model.dtype, fill.digest());
  return loaded;
}

Loaded load(const std::filesystem::path& directory, std::optional<DType> dtype = std::nullopt,
            std::size_t threads = 2) {
  return load(open_model(directory, {.dtype = dtype}), threads);
}

float kept_as(DType dtype, float value) {
  return dtype == DType::float32   ? value
         : dtype == DType::float16 ? to_float(to_half(value))
                                   : to_float(to_bfloat16(value));
}

// The numbers of one weight of a slab, as they lie in the segment.
std::vector<float> weight_at(const std::vector<std::byte>& segment, DType dtype,
                             std::uint64_t slab_start, const WeightEntry& entry) {
  std::vector<float> values;
  const std::byte* at = segment.data() + slab_start + entry.offset;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(entry.rows) * entry.cols; ++i) {
    if (dtype == DType::float32) {
      float value = 0;
      std::memcpy(&value, at + 4 * i, 4);
      values.push_back(value);
    } else {
      std::uint16_t bits = 0;
      std::memcpy(&bits, at + 2 * i, 2);
      values.push_back(dtype == DType::float16 ? to_float(Half{bits}) : to_float(BFloat16{bits}));
    }
  }
  return values;
}

// Where the reference has a weight's numbers: one tensor, or two one above the other.
std::vector<std::string> names_of(Weight weight, const std::string& prefix,
                                  const std::string& layer) {
  switch (weight) {
    case Weight::token_embedding:
      return {prefix + "embed_tokens.weight"};
    case Weight::position_embedding:
      return {prefix + "embed_positions.weight"};
    case Weight::project_in:
      return {prefix + "project_in.weight"};
    case Weight::project_out:
      return {prefix + "project_out.weight"};
    case Weight::final_norm_weight:
      return {prefix + "final_layer_norm.weight"};
    case Weight::final_norm_bias:
      return {prefix + "final_layer_norm.bias"};
    case Weight::head:
      return {"lm_head.weight"};
    case Weight::w_kv:
      return {layer + "self_attn.k_proj.weight", layer + "self_attn.v_proj.weight"};
    case Weight::b_kv:
      return {layer + "self_attn.k_proj.bias", layer + "self_attn.v_proj.bias"};
    case Weight::k_norm:
    case Weight::q_norm:
      break;  // OPT has none
    case Weight::attention_norm_weight:
      return {layer + "self_attn_layer_norm.weight"};
    case Weight::attention_norm_bias:
      return {layer + "self_attn_layer_norm.bias"};
    case Weight::w_q:
      return {layer + "self_attn.q_proj.weight"};
    case Weight::b_q:
      return {layer + "self_attn.q_proj.bias"};
    case Weight::w_o:
      return {layer + "self_attn.out_proj.weight"};
    case Weight::b_o:
      return {layer + "self_attn.out_proj.bias"};
    case Weight::mlp_norm_weight:
      return {layer + "final_layer_norm.weight"};
    case Weight::mlp_norm_bias:
      return {layer + "final_layer_norm.bias"};
    case Weight::fc1:
      return {layer + "fc1.weight"};
    case Weight::fc1_bias:
      return {layer + "fc1.bias"};
    case Weight::fc2:
      return {layer + "fc2.weight"};
    case Weight::fc2_bias:
      return {layer + "fc2.bias"};
    default:
      break;  // a plain model has no tables of groups
  }
  return {};
}

// Every weight of the segment is what the files were written from; every tensor was looked at.
void expect_weights(const TinyModel& model, DType kept, const std::vector<std::byte>& segment) {
  const auto reference = tiny_weights(model);
  const WeightLayout layout = weight_layout(model.shape, kept);
  std::size_t tensors = 0;
  const auto expect_slab = [&](const Slab& slab, std::uint64_t start, const std::string& layer) {
    for (const WeightEntry& entry : slab.entries) {
      std::vector<float> expected;
      for (const std::string& name : names_of(entry.weight, model.prefix, layer)) {
        for (const float value : reference.at(name).values) {
          expected.push_back(kept_as(kept, kept_as(model.stored, value)));
        }
        ++tensors;
      }
      EXPECT_EQ(weight_at(segment, kept, start, entry), expected)
          << name_of(entry.weight) << " " << layer;
    }
  };
  expect_slab(layout.outer, 0, "");
  for (std::int32_t i = 0; i < model.shape.num_hidden_layers; ++i) {
    expect_slab(layout.layer, layout.layer_offset({static_cast<std::uint32_t>(i)}),
                fmt::format("{}layers.{}.", model.prefix, i));
  }
  EXPECT_EQ(tensors, reference.size());
}

TEST(Weights, EveryNumberArrivesInEveryPairOfTypes) {
  for (const DType stored : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const DType kept : {DType::float32, DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(testing::Message() << name_of(stored) << " to " << name_of(kept));
      const TempDirectory directory;
      const TinyModel model{.shape = tiny_shape(), .stored = stored};
      write_model(directory.path(), model);
      expect_weights(model, kept, load(directory.path(), kept).segment);
    }
  }
}

TEST(Weights, EveryFormOfModelArrives) {
  std::vector<TinyModel> models;
  const auto with = [&](auto change) {
    TinyModel model{.shape = tiny_shape()};
    change(model);
    models.push_back(model);
  };
  with([](TinyModel& m) { m.prefix = "decoder."; });
  with([](TinyModel& m) { m.prefix = ""; });
  with([](TinyModel& m) { m.shards = 3; });
  with([](TinyModel& m) { m.shape.tie_word_embeddings = 0; });
  with([](TinyModel& m) { m.shape.word_embed_proj_dim = 20; });
  with([](TinyModel& m) { m.shape.qkv_bias = m.shape.output_bias = m.shape.mlp_bias = 0; });
  with([](TinyModel& m) { m.shape.layer_norm_elementwise_affine = 0; });
  with([](TinyModel& m) { m.shape.has_final_layer_norm = 0; });
  with([](TinyModel& m) {
    m.shape.do_layer_norm_before = 0;
    m.shape.has_final_layer_norm = 0;
  });
  with([](TinyModel& m) {
    m.shape.vocab_size = 3;  // so that the end of sequence, 2, is among them
    m.shape.hidden_size = 1;
    m.shape.num_attention_heads = m.shape.num_key_value_heads = 1;
    m.shape.head_dim = 1;
    m.shape.word_embed_proj_dim = 1;
    m.shape.ffn_dim = 1;
  });
  for (const TinyModel& model : models) {
    SCOPED_TRACE(testing::Message() << "model " << &model - models.data());
    const TempDirectory directory;
    write_model(directory.path(), model);
    const ModelOnDisk opened = open_model(directory.path(), {});
    EXPECT_THAT(opened.notices, IsEmpty());
    EXPECT_TRUE(opened.config.shape == model.shape);
    expect_weights(model, DType::float32, load(opened).segment);
  }
}

TEST(Weights, TensorsLargerThanATaskArriveWhole) {
  TinyModel model{.shape = tiny_shape(), .stored = DType::float16};
  model.shape.vocab_size = 20'001;  // 1.2 MiB in float16, 2.4 MiB in float32
  model.shape.num_hidden_layers = 1;
  const TempDirectory directory;
  write_model(directory.path(), model);
  for (const DType kept : {DType::float16, DType::float32}) {
    expect_weights(model, kept, load(directory.path(), kept, 3).segment);
  }
}

TEST(Weights, TheFingerprintIsOfTheNumbersNotOfFilesOrThreads) {
  const TempDirectory whole, sharded, other, relabelled;
  TinyModel model{.shape = tiny_shape()};
  model.shape.vocab_size = 5000;
  write_model(whole.path(), model);
  const Digest digest = load(whole.path()).digest;
  EXPECT_EQ(load(whole.path(), {}, 1).digest, digest);
  EXPECT_EQ(load(whole.path(), {}, 5).digest, digest);
  EXPECT_NE(load(whole.path(), DType::float16).digest, digest);

  TinyModel again = model;
  again.shards = 4;
  again.prefix = "decoder.";
  write_model(sharded.path(), again);
  EXPECT_EQ(load(sharded.path()).digest, digest);

  // One bit of one weight, and one switch that no weight shows.
  write_model(other.path(), model);
  std::string bytes = read_file(other.path() / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(other.path() / "model.safetensors", bytes);
  EXPECT_NE(load(other.path()).digest, digest);
  model.shape.activation_function = Activation::gelu;
  write_model(relabelled.path(), model);
  EXPECT_NE(load(relabelled.path()).digest, digest);
}

TEST(Weights, AutoKeepsWhatTheConfigDeclaresOrElseWhatIsStored) {
  const TempDirectory directory;
  const TinyModel model{.shape = tiny_shape(), .stored = DType::bfloat16};
  write_model(directory.path(), model);
  const auto kept = [&](std::optional<DType> asked) {
    return open_model(directory.path(), {.dtype = asked}).dtype;
  };
  EXPECT_EQ(kept({}), DType::bfloat16);
  EXPECT_EQ(kept(DType::float32), DType::float32);
  write_file(directory.path() / "config.json", config_json(model.shape, "float16"));
  EXPECT_EQ(kept({}), DType::float16);
  write_file(directory.path() / "config.json", config_json(model.shape, ""));
  EXPECT_EQ(kept({}), DType::bfloat16);
}

// A model whose tensors can be changed before they are written.
class ChangedModel : public ::testing::Test {
 protected:
  void write(const std::function<void(std::vector<FileTensor>&)>& change) {
    std::vector<FileTensor> tensors;
    for (const auto& [name, tensor] : tiny_weights(model_)) {
      tensors.push_back(file_tensor(name, DType::float32, tensor.shape, tensor.values));
    }
    change(tensors);
    write_file(directory_.path() / "config.json", config_json(model_.shape, "float32"));
    write_file(directory_.path() / "model.safetensors", safetensors_bytes(tensors));
  }
  static FileTensor& named(std::vector<FileTensor>& tensors, const std::string& name) {
    return *std::ranges::find(tensors, name, &FileTensor::name);
  }
  ModelOnDisk open() { return open_model(directory_.path(), {}); }
  std::string said_when_opened() {
    return complaint([&] { open(); });
  }

  TempDirectory directory_;
  TinyModel model_{.shape = tiny_shape()};
};

TEST_F(ChangedModel, AMissingTensorIsNamed) {
  write([](auto& tensors) {
    std::erase_if(tensors, [](const FileTensor& t) {
      return t.name == "model.decoder.layers.1.fc2.weight" ||
             t.name == "model.decoder.layers.1.fc2.bias";
    });
  });
  EXPECT_THAT(said_when_opened(),
              HasSubstr("tensor model.decoder.layers.1.fc2.weight is missing (and 1 more tensor)"));
}

TEST_F(ChangedModel, AShapeThatContradictsTheConfigIsNamedWithBothShapes) {
  write([](auto& tensors) {
    named(tensors, "model.decoder.layers.0.fc1.weight").shape = {32, 48};
  });
  EXPECT_THAT(said_when_opened(),
              HasSubstr("tensor model.decoder.layers.0.fc1.weight has shape [32, 48], but "
                        "config.json asks for [48, 32]"));
}

TEST_F(ChangedModel, AVocabularyThatIsNotTheTablesIsRefused) {
  write([](auto&) {});
  ModelShape shape = model_.shape;
  shape.vocab_size = 62;
  write_file(directory_.path() / "config.json", config_json(shape, "float32"));
  EXPECT_THAT(said_when_opened(), HasSubstr("embed_tokens.weight has shape [61, 32], but "
                                            "config.json asks for [62, 32]"));
}

TEST_F(ChangedModel, AnUntiedHeadMustBeThere) {
  write([](auto&) {});
  ModelShape shape = model_.shape;
  shape.tie_word_embeddings = 0;
  write_file(directory_.path() / "config.json", config_json(shape, "float32"));
  EXPECT_THAT(said_when_opened(), HasSubstr("tensor lm_head.weight is missing"));
}

TEST_F(ChangedModel, ATiedHeadMayBeRepeatedIfItIsTheSame) {
  write([](auto& tensors) {
    FileTensor head = named(tensors, "model.decoder.embed_tokens.weight");
    head.name = "lm_head.weight";
    tensors.push_back(head);
  });
  const ModelOnDisk model = open();
  EXPECT_THAT(model.notices, IsEmpty());
  expect_weights(model_, DType::float32, load(model).segment);
}

TEST_F(ChangedModel, ATiedHeadThatDiffersIsRefused) {
  write([](auto& tensors) {
    FileTensor head = named(tensors, "model.decoder.embed_tokens.weight");
    head.name = "lm_head.weight";
    head.bytes.back() = static_cast<char>(head.bytes.back() ^ 1);
    tensors.push_back(head);
  });
  EXPECT_THAT(complaint([&] { load(open()); }), HasSubstr("lm_head.weight differs from"));
}

TEST_F(ChangedModel, ATiedHeadOfAnotherShapeIsRefused) {
  write([](auto& tensors) {
    tensors.push_back(file_tensor("lm_head.weight", DType::float32, {2}, {1, 2}));
  });
  EXPECT_THAT(said_when_opened(), HasSubstr("lm_head.weight has shape [2], [61, 32] was expected"));
}

TEST_F(ChangedModel, UnneededTensorsMakeOneNotice) {
  write([](auto& tensors) {
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(file_tensor(fmt::format("extra.{}", i), DType::float16, {1}, {0}));
    }
    tensors.push_back({.name = "mask", .dtype = "BOOL", .shape = {2}, .bytes = "\1\0"});
    tensors.back().bytes.resize(2);
  });
  EXPECT_THAT(open().notices, ElementsAre(HasSubstr("7 tensors are not needed and not loaded: "
                                                    "extra.0, extra.1, extra.2, extra.3, …")));
}

TEST_F(ChangedModel, OneUnneededTensorIsOne) {
  write([](auto& tensors) { tensors.push_back(file_tensor("extra", DType::float16, {1}, {0})); });
  EXPECT_THAT(open().notices, ElementsAre("1 tensor is not needed and not loaded: extra"));
}

TEST_F(ChangedModel, ATypeThatCannotBeReadIsNamed) {
  write([](auto& tensors) {
    FileTensor& tensor = named(tensors, "model.decoder.final_layer_norm.bias");
    tensor.dtype = "I32";
  });
  EXPECT_THAT(said_when_opened(),
              HasSubstr("tensor model.decoder.final_layer_norm.bias is stored as I32"));
}

TEST_F(ChangedModel, TensorsStoredInOtherTypesAreConvertedAndTold) {
  const auto reference = tiny_weights(model_);
  write([&](auto& tensors) {
    const std::string name = "model.decoder.layers.0.fc1.bias";
    named(tensors, name) =
        file_tensor(name, DType::float16, reference.at(name).shape, reference.at(name).values);
  });
  EXPECT_THAT(open().notices,
              ElementsAre(HasSubstr("1 of 36 tensors is stored in another type and converted to "
                                    "float32")));
}

TEST_F(ChangedModel, WeightsOfAnotherModelAreRefused) {
  write([](auto& tensors) {
    for (FileTensor& tensor : tensors) {
      tensor.name = "transformer." + tensor.name;
    }
  });
  EXPECT_THAT(said_when_opened(),
              HasSubstr("no tensor is named model.decoder.embed_tokens.weight"));
}

TEST_F(ChangedModel, TwoPrefixesAtOnceAreRefused) {
  write([](auto& tensors) {
    tensors.push_back(file_tensor("decoder.embed_tokens.weight", DType::float32, {1}, {0}));
  });
  EXPECT_THAT(said_when_opened(), HasSubstr("holds both"));
}

TEST_F(ChangedModel, NumbersThatAreNotFiniteAreLoadedAsTheyAre) {
  write([](auto& tensors) {
    const float infinity = INFINITY;
    std::memcpy(named(tensors, "model.decoder.embed_tokens.weight").bytes.data(), &infinity, 4);
  });
  const Loaded loaded = load(open());
  float value = 0;
  std::memcpy(&value, loaded.segment.data(), 4);
  EXPECT_EQ(value, INFINITY);
}

TEST_F(ChangedModel, AFileChangedWhileItIsReadIsRefused) {
  write([](auto&) {});
  const ModelOnDisk model = open();
  std::filesystem::last_write_time(
      directory_.path() / "model.safetensors",
      std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_THAT(complaint([&] { load(model); }), HasSubstr("was changed while it was read"));
}

TEST_F(ChangedModel, AFileCutShortWhileItIsReadIsRefusedNotFatal) {
  write([](auto&) {});
  const ModelOnDisk model = open();
  std::filesystem::resize_file(directory_.path() / "model.safetensors", 9000);
  EXPECT_THAT(complaint([&] { load(model); }), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace poise
