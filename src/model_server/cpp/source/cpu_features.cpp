// Which instruction sets this CPU has and its operating system saves. Compiled for any x86-64, and asked of the CPU itself:
// in an emulator /proc/cpuinfo tells of the host.
#include <cstring>

extern "C" {

// Whether the instructions of a set of instruction_sets.py can be used; 0 for a name that is none.
long cpu_supports(const char* name) {
    __builtin_cpu_init();
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
    // x86-64-v3 and x86-64-v4, feature by feature: older compilers do not know these names.
    const bool avx2 = HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2") && HAS("f16c") && HAS("lzcnt") &&
                      HAS("movbe") && HAS("popcnt") && HAS("sse4.2");
    const bool avx512 = avx2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl");
    const bool avx512_bf16 = avx512 && HAS("avx512bf16") && HAS("avx512vnni");
    const bool amx = avx512_bf16 && HAS("amx-tile") && HAS("amx-bf16") && HAS("amx-int8");
#undef HAS
    const struct {
        const char* name;
        bool is_there;
    } sets[] = {{"avx2", avx2}, {"avx512", avx512}, {"avx512_bf16", avx512_bf16}, {"amx", amx}};
    for (const auto& set : sets)
        if (std::strcmp(name, set.name) == 0) return set.is_there;
    return 0;
}
}
