// A whole model made of nothing but the kernels, against what HuggingFace computes
// (tests/golden/models): that the operations mean together what each means alone. Values are kept
// in the stored type where poise keeps them so: attention inputs, keys, values.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <utility>

#include "common/files/json.h"
#include "tests/kernels/tensors.h"
#include "tests/support/source_folder.h"

namespace poise::test {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

Json read_json(const fs::path& path) { return Json::parse(std::ifstream(path)); }

// The tensors of a checkpoint by name, without the "model." in front.
class Checkpoint {
 public:
  explicit Checkpoint(const fs::path& directory) : config(read_json(directory / "config.json")) {
    const std::string name = config.value("dtype", config.value("torch_dtype", "?"));
    dtype = dtype_from(name).value();
    for (const fs::directory_entry& file : fs::directory_iterator(directory)) {
      if (file.path().extension() == ".safetensors") {
        read(file.path());
      }
    }
  }

  bool has(const std::string& name) const { return tensors_.count(name) == 1; }
  const Stored& at(const std::string& name) const { return tensors_.at(name); }
  const void* data(const std::string& name) const { return has(name) ? at(name).data() : nullptr; }

  Json config;
  DType dtype;

 private:
  void read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    std::uint64_t length = 0;
    in.read(reinterpret_cast<char*>(&length), sizeof(length));
    std::string text(length, ' ');
    in.read(text.data(), static_cast<std::streamsize>(length));
    const Json header = Json::parse(text);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        continue;
      }
      const std::size_t begin = entry["data_offsets"][0];
      const std::size_t end = entry["data_offsets"][1];
      Stored tensor(dtype, (end - begin) / static_cast<std::size_t>(size_of(dtype).n));
      in.seekg(static_cast<std::streamoff>(8 + length + begin));
      in.read(static_cast<char*>(tensor.data()), static_cast<std::streamsize>(end - begin));
      tensors_.emplace(name.rfind("model.", 0) == 0 ? name.substr(6) : name, std::move(tensor));
    }
  }

  std::map<std::string, Stored> tensors_;
};

// One forward pass over a whole sequence.
class Forward {
 public:
  Forward(const Checkpoint& checkpoint, cpu::Workers& workers)
      : c_(checkpoint),
        workers_(workers),
        hidden_(checkpoint.config["hidden_size"]),
        heads_(checkpoint.config["num_attention_heads"]),
        before_(checkpoint.config["do_layer_norm_before"]) {}

  // (tokens, vocab_size)
  std::vector<float> logits(const std::vector<std::int32_t>& tokens) {
    rows_ = static_cast<std::int32_t>(tokens.size());
    embed(tokens);
    for (int layer = 0; layer < c_.config["num_hidden_layers"]; ++layer) {
      const std::string name = "decoder.layers." + std::to_string(layer) + ".";
      attend(name);
      feed_forward(name);
    }
    if (before_) {
      x_ = norm("decoder.final_layer_norm", x_, DType::float32);
    }
    if (c_.has("decoder.project_out.weight")) {
      x_ = linear("decoder.project_out", x_);
    }
    const std::string head = c_.config["tie_word_embeddings"] ? "decoder.embed_tokens" : "lm_head";
    return to_floats(linear(head, x_));
  }

 private:
  Rows rows_of(Stored& values) const {
    return {values.data(), values.dtype(), static_cast<std::int64_t>(values.size()) / rows_};
  }
  static std::vector<float> to_floats(const Stored& values) {
    std::vector<float> floats(values.size());
    for (std::size_t i = 0; i < floats.size(); ++i) {
      floats[i] = values[i];
    }
    return floats;
  }
  static float* floats(Stored& values) { return static_cast<float*>(values.data()); }

  void embed(const std::vector<std::int32_t>& tokens) {
    const std::int32_t vocabulary = c_.config["vocab_size"];
    const std::int32_t width = c_.config["word_embed_proj_dim"];
    const PackedWeight table(c_.at("decoder.embed_tokens.weight"), vocabulary, width);
    x_ = Stored(DType::float32, static_cast<std::size_t>(rows_ * width));
    cpu::embed_tokens({floats(x_), tokens.data(), table.matrix(), rows_}, workers_);
    if (c_.has("decoder.project_in.weight")) {
      x_ = linear("decoder.project_in", x_);
    }
    std::vector<std::int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    cpu::add_positions({floats(x_), positions.data(), c_.data("decoder.embed_positions.weight"),
                        c_.dtype, rows_, hidden_, 2},
                       workers_);
  }

  Stored linear(const std::string& name, Stored& in, Epilogue epilogue = Epilogue::none,
                const Stored* residual = nullptr) {
    return product(c_.at(name + ".weight"), c_.data(name + ".bias"), in, DType::float32, epilogue,
                   residual);
  }
  Stored product(const Stored& weight, const void* bias, Stored& in, DType out_type,
                 Epilogue epilogue, const Stored* residual) {
    const Rows from = rows_of(in);
    const auto inputs = static_cast<std::int32_t>(from.stride);
    const auto outputs = static_cast<std::int32_t>(weight.size()) / inputs;
    const PackedWeight packed(weight, outputs, inputs);
    Stored out(out_type, static_cast<std::size_t>(rows_ * outputs));
    cpu::gemm(
        {.out = rows_of(out),
         .in = from,
         .weight = packed.matrix(),
         .bias = bias,
         .residual = residual == nullptr ? nullptr : static_cast<const float*>(residual->data()),
         .rows = rows_,
         .epilogue = epilogue},
        workers_);
    return out;
  }

  Stored norm(const std::string& name, const Stored& in, DType out_type) {
    Stored out(out_type, in.size());
    cpu::layer_norm({.out = rows_of(out),
                     .in = static_cast<const float*>(in.data()),
                     .weight = c_.data(name + ".weight"),
                     .bias = c_.data(name + ".bias"),
                     .dtype = c_.dtype,
                     .rows = rows_,
                     .dim = hidden_,
                     .epsilon = 1e-5f},
                    workers_);
    return out;
  }

  Stored joined(const std::string& a, const std::string& b) const {
    std::vector<float> both = to_floats(c_.at(a));
    const std::vector<float> second = to_floats(c_.at(b));
    both.insert(both.end(), second.begin(), second.end());
    return Stored(c_.dtype, both);
  }

  void attend(const std::string& layer) {
    const std::string name = layer + "self_attn.";
    Stored act = before_ ? norm(layer + "self_attn_layer_norm", x_, c_.dtype)
                         : Stored(c_.dtype, to_floats(x_));
    Stored q = linear(name + "q_proj", act);
    // Keys and values land in slots of blocks, in order.
    const Stored weight = joined(name + "k_proj.weight", name + "v_proj.weight");
    const bool biased = c_.has(name + "k_proj.bias");
    const Stored bias =
        biased ? joined(name + "k_proj.bias", name + "v_proj.bias") : Stored(c_.dtype, 0);
    const Stored kv =
        product(weight, biased ? bias.data() : nullptr, act, c_.dtype, Epilogue::none, nullptr);
    Stored slots(c_.dtype, static_cast<std::size_t>((rows_ + 15) / 16 * 16 * 2 * hidden_));
    std::memcpy(slots.data(), kv.data(), kv.size() * static_cast<std::size_t>(size_of(c_.dtype).n));
    std::vector<ContextBlock> blocks(static_cast<std::size_t>((rows_ + 15) / 16));
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      blocks[b].slot = static_cast<std::uint32_t>(b);
    }
    const AttentionSequence sequence{0, rows_, 0, 0};
    Stored out(DType::float32, q.size());
    cpu::attention({.out = floats(out),
                    .q = floats(q),
                    .slots = {slots.data(), nullptr, nullptr},
                    .dtype = c_.dtype,
                    .blocks = blocks.data(),
                    .sequences = &sequence,
                    .sequence_count = 1,
                    .heads = heads_,
                    .kv_heads = heads_,
                    .head_dim = hidden_ / heads_,
                    .scale = 1.0f / std::sqrt(static_cast<float>(hidden_ / heads_))},
                   workers_);
    x_ = linear(name + "out_proj", out, Epilogue::none, &x_);
    if (!before_) {
      x_ = norm(layer + "self_attn_layer_norm", x_, DType::float32);
    }
  }

  void feed_forward(const std::string& layer) {
    const std::string activation = c_.config["activation_function"];
    const Epilogue epilogue = activation == "relu"   ? Epilogue::relu
                              : activation == "gelu" ? Epilogue::gelu
                                                     : Epilogue::gelu_tanh;
    Stored in = before_ ? norm(layer + "final_layer_norm", x_, DType::float32) : x_;
    Stored inner = linear(layer + "fc1", in, epilogue);
    x_ = linear(layer + "fc2", inner, Epilogue::none, &x_);
    if (!before_) {
      x_ = norm(layer + "final_layer_norm", x_, DType::float32);
    }
  }

  const Checkpoint& c_;
  cpu::Workers& workers_;
  std::int32_t hidden_, heads_, rows_ = 0;
  bool before_;
  Stored x_{DType::float32, 0};  // the residual stream
};

// This forward pass is OPT's; the other families' goldens are compared with the whole path (tests/e2e/goldens.py).
std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(source_folder() / "tests/golden/models")) {
    if (entry.is_directory() &&
        read_json(entry.path() / "config.json").value("model_type", "") == "opt") {
      names.push_back(entry.path().filename());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

class WholeModel : public testing::TestWithParam<std::string> {};

TEST_P(WholeModel, ComputesWhatHuggingFaceDoes) {
  const fs::path directory = source_folder() / "tests/golden/models" / GetParam();
  const Checkpoint checkpoint(directory);
  const Json golden = read_json(directory / "golden.json");
  const double tolerance = golden["tolerance"];
  const std::size_t vocabulary = checkpoint.config["vocab_size"];
  cpu::Workers workers(2);
  Forward forward(checkpoint, workers);
  double worst = 0;
  for (const Json& one : golden["cases"]) {
    const std::vector<std::int32_t> prompt = one["prompt"];
    const std::vector<std::int32_t> tokens = one["tokens"];
    SCOPED_TRACE(testing::Message() << "prompt of " << prompt.size());
    std::vector<std::int32_t> all = prompt;
    all.insert(all.end(), tokens.begin(), tokens.end() - 1);
    std::vector<float> logits = forward.logits(all);
    const auto off = [&](std::size_t row, std::int32_t id, const Json& expected) {
      const double error =
          static_cast<double>(logits[row * vocabulary + static_cast<std::size_t>(id)]) -
          expected.get<double>();
      worst = std::max(worst, std::fabs(error));
      return error;
    };
    std::vector<SampleRow> rows;
    for (std::size_t i = 0; i < all.size(); ++i) {
      rows.push_back({.row = static_cast<std::int32_t>(i),
                      .top_p = 1,
                      .logprobs = 0,
                      .target = i + 1 < prompt.size() ? prompt[i + 1] : -1});
    }
    std::vector<SampledRow> sampled(rows.size());
    cpu::sample_tokens(
        {sampled.data(), rows.data(), logits.data(), nullptr,
         static_cast<std::int32_t>(rows.size()), static_cast<std::int32_t>(vocabulary)},
        workers);
    for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(sampled[i].logprob), one["prompt_logprobs"][i].get<double>(),
                  2 * tolerance)
          << "prompt token " << i + 1;
    }
    for (std::size_t step = 0; step < tokens.size(); ++step) {
      const std::size_t row = prompt.size() - 1 + step;
      const Json& expected = one["steps"][step];
      ASSERT_EQ(sampled[row].token, tokens[step]) << "step " << step;
      for (std::size_t i = 0; i < expected["ids"].size(); ++i) {
        ASSERT_NEAR(off(row, expected["ids"][i], expected["logits"][i]), 0, tolerance);
      }
      for (std::size_t i = 0; i < golden["fixed_ids"].size(); ++i) {
        ASSERT_NEAR(off(row, golden["fixed_ids"][i], expected["fixed"][i]), 0, tolerance);
      }
    }
  }
  RecordProperty("worst_error", std::to_string(worst));
}

INSTANTIATE_TEST_SUITE_P(Golden, WholeModel, testing::ValuesIn(model_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace poise::test
