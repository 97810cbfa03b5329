#pragma once
// What everything costs on a machine, as the planner computes with it: straight lines in the number
// of blocks or rows, for one decoder layer of one model (CAPTURE section IV-C; both papers fit them
// with R² of 0.99). A profile is fitted to measured points, or made from a named machine's few
// constants. Pure functions but for those that read and write a profile's file.
//
// A line is fitted so that it is nowhere far off in proportion: least squares of the residuals divided
// by the times, since a small mini-batch comes as often as a large one and a wrong start of a line is
// paid in every piece. Its R² is the usual one, of the times as they are, and so a little less than
// the largest that a line could have.
//
// Where times were measured, predictions follow the points and not the line. A kernel's time rises in
// steps, with each wave of tiles that its thread blocks form, and is flat below some n: on an H200,
// OPT-6.7B, no line comes nearer than a fifth to kv_gen, forward or qkv everywhere. Algorithm 1 and
// KVPR's split solve for n and keep the line.

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/blocks.h"
#include "common/device_kind.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

struct Point {
  double n;
  Seconds time;

  friend bool operator==(const Point&, const Point&) = default;
};

// T(n) = a + b · n seconds; r2 says how well it fits the points it was fitted to.
struct Line {
  double a = 0;
  double b = 0;
  double r2 = 1;
  std::vector<Point> points;  // by n, none lower than the one before; empty: of constants

  // What n takes. From point to point in straight lines, beyond the last one as steep as the line;
  // below the first one down to `a`. Without points, the line. T(0) is 0: what has nothing to do is
  // not begun.
  Seconds operator()(double n) const;
  Seconds straight(double n) const { return {n > 0 ? a + b * n : 0}; }
  // The n that takes so long by the line; 0 where even the first takes longer. REQUIRES: b > 0.
  double find(Seconds time) const;
  // All times so many times as long.
  Line operator*(double factor) const;

  friend bool operator==(const Line&, const Line&) = default;
};

// Least squares of (measured - line) / measured; with a single n among the points, the line through
// 0. An `a` below 0 is none: the line is then fitted through 0, too. One that would fall is level.
// The line alone, without the points. REQUIRES: a point with n > 0.
Line fit_line(std::span<const Point> points);
// The same points, by n, where more never takes less: neighbours that fall stand together at their
// mean (weighted as for the line), which is the rising sequence nearest to all of them.
std::vector<Point> rising(std::span<const Point> points);

// What a line was fitted to. Each point is the median of all times measured for its n.
struct MeasuredLine {
  std::string name;             // of the line, as in the file
  std::vector<Point> points;    // while the other streams worked, too
  std::vector<Point> alone;     // while they rested; empty where that never was
  Line alone_line;              // through those; none where they are all of one n
  std::int32_t remeasured = 0;  // points that lay far off and were measured again

  friend bool operator==(const MeasuredLine&, const MeasuredLine&) = default;
};

// Prompts are measured as sequences of so many rows and one of what is left.
inline constexpr std::int32_t kProfiledPrompt = 1024;

struct Profile {
  std::string name;  // the machine's
  DeviceKind kind = DeviceKind::cuda;
  std::string build;  // that measured it (measuring_build.h); empty: of constants, or not known
  std::string fingerprint;  // of the machine and the model that it holds for
  std::string model;        // of the model alone

  Line load_w;     // T_load_w: n is the share of a layer's weights, 1 the whole layer
  Line load_kv;    // T_load_kv(blocks), over the link
  Line load_act;   // T_load_act(blocks), over the link
  Line load_here;  // of so many ACT blocks that stay on the device
  Line kv_gen;     // T_kv_gen(blocks)
  Line attention;  // decode attention over so many blocks, wherever K and V came from
  // The same while nothing is copied within a GPU's memory, at whose speed it works: those copies make
  // it half as fast (H200, OPT-6.7B). Nothing where that was not measured.
  std::optional<Line> attention_undisturbed;
  Line prefill;       // a prompt's attention: n counts pairs of a new row and a row that it sees
  Line forward;       // a layer's other products for so many rows
  Line qkv;           // of `forward`, what comes before attention
  Line embed;         // of so many rows
  Line head;          // final norm, head and sampling for so many rows
  Line store_kv;      // of so many new rows, the other way over the link
  Line store_act;     // likewise
  Line tables;        // an iteration's, to the device, for so many rows
  Line results;       // of so many samples, the other way
  Seconds between{};  // from when all that was ordered is done to the next iteration's first work
  Seconds
      handover{};  // from the end of what a piece of work of another stream waits for to its begin
  Bytes gpu_memory;
  Bytes gpu_overhead;  // of it, beside the buffers: context, libraries
  Bytes host_memory;
  // More than a few rows are multiplied in tiles of so many: each one more costs a whole one.
  double row_tile = 1;
  // What else a prompt's row costs its attention, in pairs: its way into the block, and what its tile
  // has left over.
  double row_pairs = 0;
  std::vector<MeasuredLine> measured;  // empty: of constants

  const Line& attention_beside(bool copies_within_device) const {
    return copies_within_device || !attention_undisturbed ? attention : *attention_undisturbed;
  }

  // forward and qkv of so many rows.
  Seconds forward_of(double rows) const { return forward(in_tiles(rows)); }
  Seconds qkv_of(double rows) const { return qkv(in_tiles(rows)); }
  double in_tiles(double rows) const;
  // prefill of so many rows; the same pairs take longer in more and shorter prompts.
  Seconds prefill_of(double pairs, double rows) const;

  friend bool operator==(const Profile&, const Profile&) = default;
};

// Fills in what follows from `name` and `measured` (gpu_costs.cpp): attention_undisturbed, row_tile,
// row_pairs, and for few rows forward and qkv.
void complete(Profile& profile);

// A profile's lines by their names in its file, and what they count.
struct ProfileLine {
  const char* name;
  const char* unit;
  Line Profile::*line;
  bool required = true;  // files of before it was measured have none: it costs nothing then
};
std::span<const ProfileLine> profile_lines();

// A machine by its constants.
struct Machine {
  std::string_view name;
  double link = 0;     // GB/s, to the device
  double back = 0;     // GB/s, from it at the same time
  double compute = 0;  // TFLOP/s that the model's products reach
  double memory = 0;   // GB/s of the device's memory that attention reaches
  Bytes gpu_memory;
  Bytes host_memory;
};
std::span<const Machine> machines();
// Fails with the names there are.
const Machine& machine_named(std::string_view name);

Profile profile_of(const Machine& machine, const ModelShape& shape, DType dtype);
// Changes with the machine, with any size of the model and with how numbers are kept.
std::string profile_fingerprint(std::string_view machine, const ModelShape& shape, DType dtype);
// The same without the machine.
std::string model_fingerprint(const ModelShape& shape, DType dtype);

void write_profile(const std::filesystem::path& path, const Profile& profile);
// Fails, naming file and field, where it is no profile.
Profile read_profile(const std::filesystem::path& path);
// Nothing where the file is not there or holds for another machine or model, whichever build measured it;
// fails where it is there and is no profile.
std::optional<Profile> read_profile(const std::filesystem::path& path,
                                    std::string_view fingerprint);
// Of a file that the user named: fails where it is of another model.
Profile read_profile_of(const std::filesystem::path& path, const ModelShape& shape, DType dtype);

}  // namespace poise
