#include "planner/costs/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/files/sha256.h"
#include "common/trouble.h"
#include "common/weight_layout.h"

namespace poise {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;
constexpr double kLeastRise = 1e-9;  // slope of a level line, relative to its height
constexpr double kLeastTime = 1e-4;  // of the longest time; a shorter time has no larger weight

constexpr std::array<ProfileLine, 22> kLines{{
    {"load_w", "layers", &Profile::load_w},
    {"load_kv", "KV blocks", &Profile::load_kv},
    {"load_act", "ACT blocks", &Profile::load_act},
    {"load_here", "ACT blocks of the device", &Profile::load_here},
    {"kv_gen", "ACT blocks", &Profile::kv_gen},
    {"attention", "blocks", &Profile::attention},
    {"prefill", "pairs of rows", &Profile::prefill},
    {"forward", "rows", &Profile::forward},
    {"qkv", "rows", &Profile::qkv},
    {"embed", "rows", &Profile::embed},
    {"head", "rows", &Profile::head},
    {"store_kv", "rows", &Profile::store_kv},
    {"store_act", "rows", &Profile::store_act},
    {"tables", "rows", &Profile::tables, false},
    {"results", "samples", &Profile::results, false},
    {"host_attention", "KV blocks on the host", &Profile::host_attention, false},
    {"host_down", "rows", &Profile::host_down, false},
    {"host_up", "rows", &Profile::host_up, false},
    {"load_beside_host", "KV blocks", &Profile::load_beside_host, false},
    {"load_act_beside_host", "ACT blocks", &Profile::load_act_beside_host, false},
    {"absorb_rows", "rows", &Profile::absorb_rows, false},
    {"absorb", "ACT blocks", &Profile::absorb, false},
}};

// Of the model's sizes. The type of a quantised checkpoint's scales does not count: only the tensors tell it,
// which `plan` does not read, and it changes few bytes.
std::uint64_t hash_of_model(ModelShape shape, DType dtype) {
  shape.packed.scale_dtype = DType::float32;
  return weight_layout(shape, dtype).model_hash;
}

// What a fingerprint says of it; nothing of plain blocks, as before there were others.
std::string words_of(KvFormat kv_format) {
  return kv_format == KvFormat::plain ? "" : fmt::format(" kv {}", name_of(kv_format));
}

double seconds(Bytes bytes, double gb_per_second) {
  return static_cast<double>(bytes.n) / (gb_per_second * kGiga);
}

// R²: the share of the points' variance that the line explains.
double r_squared(std::span<const Point> points, const Line& line) {
  double mean = 0, scatter = 0, left = 0;
  for (const Point& point : points) {
    mean += point.time.n / static_cast<double>(points.size());
  }
  for (const Point& point : points) {
    const double residual = point.time.n - line.straight(point.n).n;
    scatter += (point.time.n - mean) * (point.time.n - mean);
    left += residual * residual;
  }
  return scatter > 0 ? 1 - left / scatter : left > 0 ? 0 : 1;
}

// The weight of each point: residuals count relative to the time.
std::vector<double> weights_of(std::span<const Point> points) {
  double longest = 0;
  for (const Point& point : points) {
    longest = std::max(longest, point.time.n);
  }
  std::vector<double> weights;
  for (const Point& point : points) {
    const double time = std::max(point.time.n, kLeastTime * longest);
    weights.push_back(time > 0 ? 1 / (time * time) : 1);
  }
  return weights;
}

double required_number(const JsonObject& object, const char* name, double least) {
  const auto value = object.number(name, {.min = least});
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

JsonObject required_object(const JsonObject& object, const char* name) {
  const auto value = object.object(name);
  if (!value) {
    object.refuse(name, "is missing");
  }
  return *value;
}

// No time falls as n rises, and none is below 0.
Line line_of(const JsonObject& values) {
  return {.a = required_number(values, "a", 0),
          .b = required_number(values, "b", 0),
          .r2 = required_number(values, "r2", std::numeric_limits<double>::lowest())};
}

nlohmann::ordered_json json_of(const Line& line) {
  return {{"a", line.a}, {"b", line.b}, {"r2", line.r2}};
}

// [n, seconds, seconds beside the line]
nlohmann::ordered_json json_of(std::span<const Point> points, const Line& line) {
  auto list = nlohmann::ordered_json::array();
  for (const Point& point : points) {
    list.push_back({point.n, point.time.n, point.time.n - line.straight(point.n).n});
  }
  return list;
}

std::vector<Point> points_of(const JsonObject& object) {
  std::vector<Point> points;
  const nlohmann::json* list = object.find("points");
  if (list == nullptr || !list->is_array()) {
    object.refuse("points", "must be a list");
  }
  for (const nlohmann::json& point : *list) {
    if (!point.is_array() || point.size() < 2 || !point[0].is_number() || !point[1].is_number()) {
      object.refuse("points", fmt::format("must hold [n, seconds], not {}", described(point)));
    }
    points.push_back({point[0].get<double>(), {point[1].get<double>()}});
  }
  return points;
}

// Files of before kinds were kept say it by how the name begins.
DeviceKind kind_of(const JsonObject& object, std::string_view name) {
  const auto text = object.string("kind");
  if (!text) {
    return name.starts_with("cpu") ? DeviceKind::cpu : DeviceKind::cuda;
  }
  const auto kind = device_kind_from(*text);
  if (!kind) {
    object.refuse("kind", fmt::format("must be cpu or cuda, not {}", shown(*text)));
  }
  return *kind;
}

// Files of before it was kept have none, whatever it was.
KvFormat kv_format_of(const JsonObject& object) {
  const auto text = object.string("kv_cache_dtype");
  const auto format = text ? kv_format_from(*text) : KvFormat::plain;
  if (!format) {
    object.refuse("kv_cache_dtype",
                  fmt::format("must be auto, int8 or int4, not {}", shown(*text)));
  }
  return *format;
}

std::string hash_text(std::string_view text) {
  return to_hex(sha256(std::as_bytes(std::span(text.data(), text.size()))));
}

}  // namespace

Seconds Line::operator()(double n) const {
  if (n <= 0) {
    return {};
  }
  if (points.empty()) {
    return straight(n);
  }
  const auto next = std::ranges::lower_bound(points, n, {}, &Point::n);
  if (next == points.end()) {
    return {points.back().time.n + b * (n - points.back().n)};
  }
  const Point before =
      next == points.begin() ? Point{.n = 0, .time = {std::min(a, next->time.n)}} : next[-1];
  const double share = (n - before.n) / (next->n - before.n);
  return {before.time.n + share * (next->time - before.time).n};
}

Line Line::operator*(double factor) const {
  Line scaled = *this;
  scaled.a *= factor;
  scaled.b *= factor;
  for (Point& point : scaled.points) {
    point.time = point.time * factor;
  }
  return scaled;
}

double Line::find(Seconds time) const {
  check(b > 0, "a line that is searched rises");
  return std::max(0.0, (time.n - a) / b);
}

Line fit_line(std::span<const Point> points) {
  const std::vector<double> weights = weights_of(points);
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto& [at, time] = points[i];
    n += weights[i];
    x += weights[i] * at;
    y += weights[i] * time.n;
    xx += weights[i] * at * at;
    xy += weights[i] * at * time.n;
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
  if (line.b <= 0) {  // nearly level instead of level, so that a search along it ends
    line = {.a = y / n, .b = kLeastRise * y / n};
  }
  line.r2 = r_squared(points, line);
  return line;
}

std::vector<Point> rising(std::span<const Point> points) {
  struct Level {
    double sum = 0, weight = 0;
    std::size_t count = 0;

    double height() const { return sum / weight; }
  };
  std::vector<Point> sorted(points.begin(), points.end());
  std::ranges::sort(sorted, {}, &Point::n);
  const std::vector<double> weights = weights_of(sorted);
  std::vector<Level> levels;  // pool adjacent violators
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    levels.push_back({weights[i] * sorted[i].time.n, weights[i], 1});
    while (levels.size() > 1 && levels[levels.size() - 2].height() > levels.back().height()) {
      const Level last = levels.back();
      levels.pop_back();
      levels.back().sum += last.sum;
      levels.back().weight += last.weight;
      levels.back().count += last.count;
    }
  }
  std::size_t next = 0;
  for (const Level& level : levels) {
    for (std::size_t i = 0; i < level.count; ++i) {
      sorted[next++].time = {level.height()};
    }
  }
  return sorted;
}

std::span<const Machine> machines() {
  // Links are what large copies reach, compute what the model's products do: the H200's measured,
  // the others' as published systems on them imply.
  static const std::array<Machine, 4> all{{
      {"rtx4090-pcie4", 22, 22, 125, 1000, kGiB * 24, kGiB * 882},
      {"a100-pcie4", 25, 25, 230, 1500, kGiB * 40, kGiB * 256},
      {"h200-pcie5", 55.5, 51, 660, 3200, kGiB * 139, kGiB * 128},
      {"l4-pcie4", 22, 22, 60, 260, kGiB * 23, kGiB * 128},
  }};
  return all;
}

std::string machine_names() {
  std::string names;
  for (const Machine& machine : machines()) {
    names += (names.empty() ? "" : ", ") + machine.name;
  }
  return names;
}

const Machine& machine_named(std::string_view name) {
  const auto found = std::ranges::find(machines(), name, &Machine::name);
  if (found == machines().end()) {
    fail("there is no machine {}; there are {}", name, machine_names());
  }
  return *found;
}

Bytes moved_by_attention(const ModelShape& shape, DType dtype, KvFormat kv_format) {
  const Bytes stored = block_sizes(shape, dtype, kv_format).block(BlockKind::kv);
  const Bytes numbers = block_sizes(shape, dtype, KvFormat::plain).block(BlockKind::kv);
  return kv_format == KvFormat::plain ? stored : stored + numbers * 2;
}

Profile profile_of(const Machine& machine, const ModelShape& shape, DType dtype,
                   KvFormat kv_format) {
  const BlockSizes sizes = block_sizes(shape, dtype, kv_format);
  const WeightLayout layout = weight_layout(shape, dtype);
  double weights = 0;  // that a row is multiplied with in a layer
  for (const WeightEntry& entry : layout.layer.entries) {
    weights += entry.matrix() ? static_cast<double>(entry.rows) * entry.cols : 0;
  }
  double first = 0;  // of them, those before attention
  for (const WeightEntry& entry : layout.layer.entries) {
    const bool before = entry.weight == Weight::w_kv || entry.weight == Weight::w_q;
    first += before ? static_cast<double>(entry.rows) * entry.cols : 0;
  }
  const double flops = machine.compute * kTera;
  const double head = static_cast<double>(shape.vocab_size) * shape.word_embed_proj_dim;
  const double w_kv = 2.0 * shape.kv_dim() * shape.hidden_size;
  const auto per_row = [&](BlockKind kind) {
    return Line{.b = seconds(sizes.row(kind), machine.back)};
  };
  // Few rows cost the time of reading the weights from the device's memory, many rows that of their
  // operations. A packed matrix is read, written as numbers, and those are read.
  Bytes read = layout.layer.bytes;
  for (const WeightEntry& entry : layout.layer.entries) {
    read += entry.packed ? size_of(dtype) * 2 * entry.rows * entry.cols : Bytes{};
  }
  // Keys and values that become codes are made some rows at a time (Profile::kv_gen_of): each time W_K and
  // W_V are read. Plain ones are made at once, and the papers' machines have no constants.
  const Bytes again = kv_format == KvFormat::plain
                          ? Bytes{}
                          : size_of(dtype) * 2 * shape.kv_dim() * shape.hidden_size;
  // Queries and attention's output, in the type between operations.
  const Bytes q_row =
      size_of(machine.kind == DeviceKind::cpu ? DType::float32 : dtype) * shape.q_dim();
  // Each position of a block is multiplied twice with a row of hidden_size for each head, and read: by a GPU, whose
  // multiprocessors hold no row's queries, once for scores and once for sums.
  const double absorbed =
      kBlockTokens * 4.0 * shape.num_attention_heads * shape.hidden_size / flops +
      seconds(sizes.block(BlockKind::act) * (machine.kind == DeviceKind::cpu ? 1 : 2),
              machine.memory);
  const bool host = machine.host > 0;
  const Line forward{.a = seconds(read, machine.memory), .b = 2 * weights / flops};
  const double qkv_share = first / weights;
  return {.name = machine.name,
          .kind = machine.kind,
          .kv_format = kv_format,
          .fingerprint = profile_fingerprint(machine.name, shape, dtype, kv_format),
          .model = model_fingerprint(shape, dtype, kv_format),
          .load_w = {.b = seconds(layout.layer.bytes, machine.link)},
          .load_kv = {.b = seconds(sizes.block(BlockKind::kv), machine.link)},
          .load_act = {.b = seconds(sizes.block(BlockKind::act), machine.link)},
          .load_here = {.b = seconds(sizes.block(BlockKind::act) * 2, machine.memory)},
          .kv_gen = {.a = seconds(again, machine.memory), .b = kBlockTokens * 2 * w_kv / flops},
          .attention = {.b = seconds(moved_by_attention(shape, dtype, kv_format), machine.memory)},
          .attention_undisturbed = {},
          .absorb_rows = {.a = seconds(size_of(dtype) * static_cast<std::int64_t>(w_kv),
                                       machine.memory),
                          .b = 4.0 * shape.q_dim() * shape.hidden_size / flops + absorbed},
          .absorb = {.b = absorbed},
          .prefill = {.b = 4.0 * shape.q_dim() / flops},
          .forward = forward,
          .qkv = {.a = forward.a * qkv_share, .b = forward.b * qkv_share},
          .embed = {},
          .head = {.a = seconds(size_of(dtype) * static_cast<std::int64_t>(head), machine.memory),
                   .b = 2 * head / flops},
          .store_kv = per_row(BlockKind::kv),
          .store_act = per_row(BlockKind::act),
          .host_attention = {.b = host ? seconds(sizes.block(BlockKind::kv), machine.host) : 0},
          .host_down = {.b = host ? seconds(sizes.kv_row + q_row, machine.back) : 0},
          .host_up = {.b = host ? seconds(q_row, machine.link) : 0},
          .load_beside_host = {},
          .load_act_beside_host = {},
          .host_attention_undisturbed = {},
          .gpu_memory = machine.gpu_memory,
          .gpu_overhead = machine.gpu_overhead,
          .host_memory = machine.host_memory};
}

std::string profile_fingerprint(std::string_view machine, const ModelShape& shape, DType dtype,
                                KvFormat kv_format) {
  return hash_text(
      fmt::format("{} {:016x}{}", machine, hash_of_model(shape, dtype), words_of(kv_format)));
}

std::string model_fingerprint(const ModelShape& shape, DType dtype, KvFormat kv_format) {
  return hash_text(fmt::format("{:016x}{}", hash_of_model(shape, dtype), words_of(kv_format)));
}

std::span<const ProfileLine> profile_lines() { return kLines; }

nlohmann::ordered_json json_of(const Profile& profile) {
  nlohmann::ordered_json json{{"name", profile.name},
                              {"kind", name_of(profile.kind)},
                              {"kv_cache_dtype", name_of(profile.kv_format)},
                              {"build", profile.build},
                              {"fingerprint", profile.fingerprint},
                              {"model", profile.model},
                              {"gpu_memory", profile.gpu_memory.n},
                              {"gpu_overhead", profile.gpu_overhead.n},
                              {"host_memory", profile.host_memory.n},
                              {"between", profile.between.n},
                              {"event_latency", profile.event_latency.n}};
  for (const ProfileLine& line : kLines) {
    json[line.name] = json_of(profile.*line.line);
    json[line.name]["unit"] = line.unit;
    const auto measured = std::ranges::find(profile.measured, line.name, &MeasuredLine::name);
    if (measured != profile.measured.end()) {
      json[line.name]["points"] = json_of(measured->points, profile.*line.line);
      json[line.name]["remeasured"] = measured->remeasured;
      json[line.name]["alone"] = json_of(measured->alone_line);
      json[line.name]["alone"]["points"] = json_of(measured->alone, measured->alone_line);
    }
  }
  return json;
}

void write_profile(const std::filesystem::path& path, const Profile& profile) {
  replace_file(path, json_of(profile).dump(2) + '\n', {.shared = true});
}

Profile profile_from(const JsonObject& object) {
  if (std::ranges::none_of(kLines,
                           [&](const ProfileLine& line) { return object.has(line.name); })) {
    fail(
        "{}: this is no profile: it has none of a profile's lines; `poise profile -o FILE` makes "
        "one",
        object.what());
  }
  const std::string name = object.string("name").value_or("");
  Profile profile{.name = name,
                  .kind = kind_of(object, name),
                  .kv_format = kv_format_of(object),
                  .build = object.string("build").value_or(""),
                  .fingerprint = object.string("fingerprint").value_or(""),
                  .model = object.string("model").value_or(""),
                  .between = {required_number(object, "between", 0)},
                  .event_latency = {object.number("event_latency", {.min = 0}).value_or(0)},
                  .gpu_memory = required_bytes(object, "gpu_memory"),
                  .gpu_overhead = required_bytes(object, "gpu_overhead"),
                  .host_memory = required_bytes(object, "host_memory")};
  for (const ProfileLine& line : kLines) {
    if (!line.required && !object.has(line.name)) {
      continue;
    }
    const JsonObject values = required_object(object, line.name);
    profile.*line.line = line_of(values);
    if (values.has("points")) {
      const JsonObject alone = required_object(values, "alone");
      profile.measured.push_back(
          {.name = line.name,
           .points = points_of(values),
           .alone = points_of(alone),
           .alone_line = line_of(alone),
           .remeasured = static_cast<std::int32_t>(
               values.integer("remeasured", {.min = 0, .max = 1 << 20}).value_or(0))});
      (profile.*line.line).points = rising(profile.measured.back().points);
    }
  }
  complete(profile);
  return profile;
}

Profile read_profile(const std::filesystem::path& path) {
  const nlohmann::json json = read_json_file(path);
  return profile_from(JsonObject(json, path.string()));
}

std::optional<Profile> read_profile(const std::filesystem::path& path,
                                    std::string_view fingerprint) {
  if (!std::filesystem::exists(path)) {
    return std::nullopt;
  }
  Profile profile = read_profile(path);
  return profile.fingerprint == fingerprint ? std::optional(std::move(profile)) : std::nullopt;
}

Profile read_profile_of(const std::filesystem::path& path, const ModelShape& shape, DType dtype,
                        KvFormat kv_format) {
  Profile profile = read_profile(path);
  if (profile.model != model_fingerprint(shape, dtype, kv_format)) {
    fail(
        "{}: the profile of {} is of another model, or of this one with another --dtype, "
        "--quantization, "
        "--pack-weights or --kv-cache-dtype: name the options that it was measured with, or "
        "measure again with poise "
        "profile",
        path.string(), profile.name);
  }
  profile.kv_format = kv_format;  // files of before it was kept do not say it
  complete(profile);
  return profile;
}

}  // namespace poise
