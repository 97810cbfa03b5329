#pragma once
// The costs that the planner computes with: straight lines in the number of blocks or rows, for one
// decoder layer of one model on one machine (CAPTURE section IV-C; both papers report R² of 0.99). A
// profile is fitted to measured points, or made from a named machine's few constants. The functions
// are pure, except those that read and write a profile's file.
//
// The fit minimises relative errors: least squares of the residuals divided by the times, since a
// small mini-batch comes as often as a large one, and every copy or kernel pays for a wrong intercept.
// Its R² is the usual one, of absolute times, and so a little less than the largest that a line could
// have.
//
// Measured predictions follow the points and not the line. A kernel's time rises in steps, with each
// wave of tiles that its thread blocks form, and is flat below some n: on an H200 with OPT-6.7B, every
// line is somewhere at least a fifth off for kv_gen, forward or qkv. Algorithm 1 and KVPR's split solve
// for n and use the line.

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/blocks.h"
#include "common/device_kind.h"
#include "common/files/json_file.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

struct Point {
  double n;
  Seconds time;

  friend bool operator==(const Point&, const Point&) = default;
};

// T(n) = a + b · n seconds; r2 says how well it fits its points.
struct Line {
  double a = 0;
  double b = 0;
  double r2 = 1;
  std::vector<Point> points;  // by n, none lower than the one before; empty: of constants

  // The time for n: interpolated between points, with the line's slope beyond the last point, and
  // towards `a` below the first. Without points, the line. T(0) is 0: work of size 0 is not started.
  Seconds operator()(double n) const;
  Seconds straight(double n) const { return {n > 0 ? a + b * n : 0}; }
  // The n whose time on the line is `time`; 0 if that time is below `a`. REQUIRES: b > 0.
  double find(Seconds time) const;
  // All times multiplied by a factor.
  Line operator*(double factor) const;

  friend bool operator==(const Line&, const Line&) = default;
};

// Least squares of (measured - line) / measured. If all points have the same n, or `a` would be below
// 0, the line goes through 0. A falling line becomes level. Returns the line without the points.
// REQUIRES: a point with n > 0.
Line fit_line(std::span<const Point> points);
// The points in the order of n, made non-decreasing: falling neighbours are replaced by their mean
// (weighted as for the line), which gives the nearest non-decreasing sequence.
std::vector<Point> rising(std::span<const Point> points);

// What a line was fitted to. Each point is the median of all times measured for its n.
struct MeasuredLine {
  std::string name;             // of the line, as in the file
  std::vector<Point> points;    // while the other streams worked too
  std::vector<Point> alone;     // while they were idle; empty if they never were
  Line alone_line;              // through those; zero if they all have one n
  std::int32_t remeasured = 0;  // outliers that were measured again

  friend bool operator==(const MeasuredLine&, const MeasuredLine&) = default;
};

// Prompts are measured as sequences of this many rows, and one of the rest.
inline constexpr std::int32_t kProfiledPrompt = 1024;

struct Profile {
  std::string name;  // the machine's
  DeviceKind kind = DeviceKind::cuda;
  KvFormat kv_format = KvFormat::plain;  // of the model's KV blocks
  std::string build;  // that measured it (measuring_build.h); empty: of constants, or not known
  std::string fingerprint;  // of the machine and the model that it holds for
  std::string model;        // of the model alone

  Line load_w;     // T_load_w: n is the share of a layer's weights, 1 the whole layer
  Line load_kv;    // T_load_kv(blocks), over the link
  Line load_act;   // T_load_act(blocks), over the link
  Line load_here;  // of ACT blocks that stay on the device
  Line kv_gen;     // T_kv_gen(blocks)
  Line attention;  // decode attention, by blocks; it does not matter where K and V come from
  // The same without copies within the GPU's memory, which make it half as fast (H200, OPT-6.7B). Nothing if that was not
  // measured, and for codes: decoding them takes as long as the clock says, which work lowers. 446 blocks of int8 took 151 us
  // on a cool GPU, 200 in a run without such copies, 208 in the work that keeps the GPU busy.
  std::optional<Line> attention_undisturbed;
  // Attention straight from activations, instead of kv_gen and attention: of rows with one ACT block each, with their
  // queries' products with W_K and those with W_V; and by the blocks beyond these. Nothing where it is not known.
  Line absorb_rows, absorb;
  bool answers_absorb = false;  // set by deciding_costs: rows of answers are priced as absorbing
  Line prefill;    // a prompt's attention: n counts pairs of a new row and a row that it sees
  Line forward;    // a layer's other products, by rows
  Line qkv;        // the part of `forward` before attention
  Line embed;      // by rows
  Line head;       // final norm, head and sampling, by rows
  Line store_kv;   // by new rows, from device to host
  Line store_act;  // likewise
  Line tables;     // an iteration's tables to the device, by rows
  Line results;    // by samples, from device to host
  // Host cores: attention of single rows where their KV blocks lie (T_host, by blocks), and what crosses the
  // link for it, by rows: queries and new rows to them, attention's output from them. Nothing where it is
  // not known.
  Line host_attention, host_down, host_up;
  // Link and host cores read the same memory, and slow each other down: load_kv and load_act while host cores attend, and
  // T_host while the link is idle (host_attention: while it is not). Nothing if that was not measured.
  Line load_beside_host, load_act_beside_host;
  std::optional<Line> host_attention_undisturbed;
  // A load's time while host cores attend, as a multiple of its time while they rest: of KV blocks, and of ACT blocks and
  // weights. Beside host cores all cross at the same bytes a second, but blocks of codes are slower than those without them.
  double kv_slowdown = 1, act_slowdown = 1;
  Seconds between{};  // from the end of an iteration to the next one's first work
  // From the end of the work that another stream waits for to the begin of what waits.
  Seconds event_latency{};
  Bytes gpu_memory;
  Bytes gpu_overhead;  // of it, beside the buffers: context, libraries
  Bytes host_memory;
  // Products of more than a few rows have tiles of this many rows; one more row costs a whole tile.
  double row_tile = 1;
  // What a prompt's row costs attention besides, in pairs: storing it in its block, and unused parts of
  // its tile.
  double row_pairs = 0;
  std::vector<MeasuredLine> measured;  // empty: of constants

  bool knows_absorption() const { return absorb.b > 0; }
  bool knows_host() const { return host_attention.b > 0; }
  const Line& attention_beside(bool copies_within_device) const {
    return copies_within_device || !attention_undisturbed ? attention : *attention_undisturbed;
  }

  // Of a layer's loads: those of KV blocks, and those of ACT blocks and weights.
  struct LinkTime {
    Seconds kv{}, rest{};
  };
  // Link and host cores that begin a layer's work at the same time: how much longer the loads take than `link`, their time
  // while host cores rest, and which share of `beside`, T_host beside a busy link, host cores take. Once the first is
  // done, the other goes on at its pace alone, host cores at that of `alone`.
  struct Paces {
    double link = 1, host = 1;
  };
  Paces paces(LinkTime link, Seconds beside, Seconds alone) const;
  Seconds host_alone(double blocks) const {
    return host_attention_undisturbed ? (*host_attention_undisturbed)(blocks)
                                      : host_attention(blocks);
  }

  // forward and qkv of `rows` rows.
  Seconds forward_of(double rows) const { return forward(in_tiles(rows)); }
  Seconds qkv_of(double rows) const { return qkv(in_tiles(rows)); }
  double in_tiles(double rows) const;
  // `rows` single rows that attend `blocks` ACT blocks as they are; where that is not known, it is priced as
  // kv_gen and attention.
  Seconds absorb_of(double blocks, double rows) const;
  // What `rows` rows of answers in a mini-batch pay for its ACT blocks beyond attention: kv_gen; or, if they absorb,
  // absorbing less attention, and what each row pays once.
  Line gen_of_answers(double rows) const;
  // kv_gen of these blocks, made at most `at_once` at a time; 0: all at once.
  Seconds kv_gen_of(double blocks, double at_once) const;
  // prefill of these rows and pairs; the same pairs take longer in more and shorter prompts.
  Seconds prefill_of(double pairs, double rows) const;

  friend bool operator==(const Profile&, const Profile&) = default;
};

// The costs by which a policy decides. With absorption, ACT blocks of answers' rows are priced as absorbed, those of prompts
// still as kv_gen.
std::shared_ptr<const Profile> deciding_costs(std::shared_ptr<const Profile> profile,
                                              bool absorption);

// Fills in what follows from `name` and `measured` (gpu_costs.cpp): attention_undisturbed,
// host_attention_undisturbed, kv_slowdown, act_slowdown, row_tile, row_pairs, and for few rows forward and qkv.
void complete(Profile& profile);

// A profile's lines by their names in its file, and what they count.
struct ProfileLine {
  const char* name;
  const char* unit;
  Line Profile::*line;
  bool required = true;  // files of before it was measured have none: it costs nothing then
};
std::span<const ProfileLine> profile_lines();

// A machine by its constants: a named one, or one that a file describes (machine_file.h).
struct Machine {
  std::string name;
  double link = 0;     // GB/s, to the device
  double back = 0;     // GB/s, from it at the same time
  double compute = 0;  // TFLOP/s that the model's products reach
  double memory = 0;   // GB/s of the device's memory that attention reaches
  Bytes gpu_memory;
  Bytes host_memory;
  DeviceKind kind = DeviceKind::cuda;
  Bytes gpu_overhead = kGiB;  // of gpu_memory, beside the buffers
  double host = 0;            // GB/s of keys and values that its host cores attend; 0: not known

  friend bool operator==(const Machine&, const Machine&) = default;
};
std::span<const Machine> machines();
// Their names, in words.
std::string machine_names();
// Fails with the names there are.
const Machine& machine_named(std::string_view name);

// What the device's memory moves for attention over a block. Codes are read and count as if their numbers were
// written and read besides, as those of packed weights are: attention decodes them as it reads, and that
// keeps it from memory's speed. An H100 needed three times as long for int4 (bench/results/2026-11-25-h100.md).
Bytes moved_by_attention(const ModelShape& shape, DType dtype, KvFormat kv_format);
Profile profile_of(const Machine& machine, const ModelShape& shape, DType dtype,
                   KvFormat kv_format = KvFormat::plain);
// Changes with the machine, any size of the model, the dtype, and the format of KV blocks.
std::string profile_fingerprint(std::string_view machine, const ModelShape& shape, DType dtype,
                                KvFormat kv_format = KvFormat::plain);
// The same without the machine.
std::string model_fingerprint(const ModelShape& shape, DType dtype,
                              KvFormat kv_format = KvFormat::plain);

// A profile as its file has it. `profile_from` fails and names the field if it is no profile.
nlohmann::ordered_json json_of(const Profile& profile);
Profile profile_from(const JsonObject& object);
void write_profile(const std::filesystem::path& path, const Profile& profile);
// Fails and names file and field if it is no profile.
Profile read_profile(const std::filesystem::path& path);
// Nothing if the file does not exist or is of another machine or model; the build that measured it does
// not matter. Fails if it is no profile.
std::optional<Profile> read_profile(const std::filesystem::path& path,
                                    std::string_view fingerprint);
// For a file that the user named: fails if it is of another model.
Profile read_profile_of(const std::filesystem::path& path, const ModelShape& shape, DType dtype,
                        KvFormat kv_format = KvFormat::plain);

}  // namespace poise
