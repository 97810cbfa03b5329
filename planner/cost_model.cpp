#include "planner/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_file.h"
#include "common/sha256.h"
#include "common/trouble.h"
#include "common/weight_layout.h"

namespace poise {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;

struct NamedLine {
  const char* name;
  Line Profile::*line;
};
constexpr std::array<NamedLine, 9> kLines{{{"load_w", &Profile::load_w},
                                           {"load_kv", &Profile::load_kv},
                                           {"load_act", &Profile::load_act},
                                           {"kv_gen", &Profile::kv_gen},
                                           {"attention", &Profile::attention},
                                           {"forward", &Profile::forward},
                                           {"head", &Profile::head},
                                           {"store_kv", &Profile::store_kv},
                                           {"store_act", &Profile::store_act}}};

double seconds(Bytes bytes, double gb_per_second) {
  return static_cast<double>(bytes.n) / (gb_per_second * kGiga);
}

// How much of the points' scatter the line explains.
double r_squared(std::span<const Point> points, const Line& line) {
  double mean = 0, scatter = 0, left = 0;
  for (const Point& point : points) {
    mean += point.time.n / static_cast<double>(points.size());
  }
  for (const Point& point : points) {
    const double residual = point.time.n - (line.a + line.b * point.n);
    scatter += (point.time.n - mean) * (point.time.n - mean);
    left += residual * residual;
  }
  return scatter > 0 ? 1 - left / scatter : left > 0 ? 0 : 1;
}

double required_number(const JsonObject& object, const char* name) {
  const auto value = object.number(name, {});
  if (!value) {
    object.refuse(name, "is missing");
  }
  return *value;
}

Bytes required_bytes(const JsonObject& object, const char* name) {
  const auto value = object.integer(name, {.min = 0});
  if (!value) {
    object.refuse(name, "is missing");
  }
  return {*value};
}

}  // namespace

double Line::find(Seconds time) const {
  check(b > 0, "a line that is searched rises");
  return std::max(0.0, (time.n - a) / b);
}

Line fit_line(std::span<const Point> points) {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const Point& point : points) {
    n += 1;
    x += point.n;
    y += point.time.n;
    xx += point.n * point.n;
    xy += point.n * point.time.n;
  }
  check(xx > 0, "a line is fitted to points with n > 0");
  const double spread = n * xx - x * x;
  Line line;
  if (spread > 1e-12 * n * xx) {
    line.b = (n * xy - x * y) / spread;
    line.a = (y - line.b * x) / n;
  }
  if (line.a < 0 || spread <= 1e-12 * n * xx) {
    line = {.a = 0, .b = xy / xx};
  }
  line.r2 = r_squared(points, line);
  return line;
}

std::span<const Machine> machines() {
  // Links are what large copies reach, compute what the model's products do: the H200's measured,
  // the others' as published systems on them imply.
  static constexpr std::array<Machine, 4> all{{
      {"rtx4090-pcie4", 22, 22, 125, 1000, kGiB * 24, kGiB * 882},
      {"a100-pcie4", 25, 25, 230, 1500, kGiB * 40, kGiB * 256},
      {"h200-pcie5", 55.5, 51, 660, 3200, kGiB * 139, kGiB * 128},
      {"l4-pcie4", 22, 22, 60, 260, kGiB * 23, kGiB * 128},
  }};
  return all;
}

const Machine& machine_named(std::string_view name) {
  const auto found = std::ranges::find(machines(), name, &Machine::name);
  if (found == machines().end()) {
    std::string names;
    for (const Machine& machine : machines()) {
      names += (names.empty() ? "" : ", ") + std::string(machine.name);
    }
    fail("there is no machine {}; there are {}", name, names);
  }
  return *found;
}

Profile profile_of(const Machine& machine, const ModelShape& shape, DType dtype) {
  const BlockSizes sizes = block_sizes(shape, dtype);
  const WeightLayout layout = weight_layout(shape, dtype);
  double weights = 0;  // that a row is multiplied with in a layer
  for (const WeightEntry& entry : layout.layer.entries) {
    weights += entry.matrix() ? static_cast<double>(entry.rows) * entry.cols : 0;
  }
  const double flops = machine.compute * kTera;
  const double head = static_cast<double>(shape.vocab_size) * shape.word_embed_proj_dim;
  const double w_kv = 2.0 * shape.kv_dim() * shape.hidden_size;
  const auto per_row = [&](BlockKind kind) {
    return Line{.b = seconds(sizes.row(kind), machine.back)};
  };
  // Few rows cost the weights' way from the device's memory, many their operations.
  return {.name = std::string(machine.name),
          .fingerprint = profile_fingerprint(machine.name, shape, dtype),
          .load_w = {.b = seconds(layout.layer.bytes, machine.link)},
          .load_kv = {.b = seconds(sizes.block(BlockKind::kv), machine.link)},
          .load_act = {.b = seconds(sizes.block(BlockKind::act), machine.link)},
          .kv_gen = {.b = kBlockTokens * 2 * w_kv / flops},
          .attention = {.b = seconds(sizes.block(BlockKind::kv), machine.memory)},
          .forward = {.a = seconds(layout.layer.bytes, machine.memory), .b = 2 * weights / flops},
          .head = {.a = seconds(size_of(dtype) * static_cast<std::int64_t>(head), machine.memory),
                   .b = 2 * head / flops},
          .store_kv = per_row(BlockKind::kv),
          .store_act = per_row(BlockKind::act),
          .gpu_memory = machine.gpu_memory,
          .host_memory = machine.host_memory};
}

std::string profile_fingerprint(std::string_view machine, const ModelShape& shape, DType dtype) {
  const std::string text =
      fmt::format("{} {:016x}", machine, weight_layout(shape, dtype).model_hash);
  return to_hex(sha256(std::as_bytes(std::span(text))));
}

void write_profile(const std::filesystem::path& path, const Profile& profile) {
  nlohmann::ordered_json json{{"name", profile.name},
                              {"fingerprint", profile.fingerprint},
                              {"gpu_memory", profile.gpu_memory.n},
                              {"host_memory", profile.host_memory.n}};
  for (const NamedLine& line : kLines) {
    const Line& values = profile.*line.line;
    json[line.name] = {{"a", values.a}, {"b", values.b}, {"r2", values.r2}};
  }
  // Whoever reads at the same time sees the old file or the new one.
  std::filesystem::path fresh = path;
  fresh += ".new";
  std::ofstream file(fresh);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) {
    fail(Exit::busy, "{}: the profile cannot be written", fresh.string());
  }
  std::filesystem::rename(fresh, path);
}

std::optional<Profile> read_profile(const std::filesystem::path& path,
                                    std::string_view fingerprint) {
  if (!std::filesystem::exists(path)) {
    return std::nullopt;
  }
  const nlohmann::json json = read_json_file(path);
  const JsonObject object(json, path.string());
  Profile profile{.name = object.string("name").value_or(""),
                  .fingerprint = object.string("fingerprint").value_or(""),
                  .gpu_memory = required_bytes(object, "gpu_memory"),
                  .host_memory = required_bytes(object, "host_memory")};
  for (const NamedLine& line : kLines) {
    const auto values = object.object(line.name);
    if (!values) {
      object.refuse(line.name, "is missing");
    }
    profile.*line.line = {.a = required_number(*values, "a"),
                          .b = required_number(*values, "b"),
                          .r2 = required_number(*values, "r2")};
  }
  if (profile.fingerprint != fingerprint) {
    return std::nullopt;
  }
  return profile;
}

}  // namespace poise
