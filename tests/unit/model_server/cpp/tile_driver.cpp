// What test_tile_model.py calls: each instruction by a tile's number, of the model or the processor's own.
#if defined(TERCET_TILE_MODEL)
#include "tile_model.hpp"
#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define OF_EACH(tile, CALL) \
    switch (tile) { \
        case 0: CALL(0); break; \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        case 6: CALL(6); break; \
        case 7: CALL(7); break; \
    }

extern "C" {
#if !defined(TERCET_TILE_MODEL)
// Ask the kernel for tiles: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. 0: they may be used.
long permit() { return syscall(SYS_arch_prctl, 0x1023, 18); }
#endif
void configure(const void* from) { _tile_loadconfig(from); }
void read_configuration(void* to) { _tile_storeconfig(to); }
void release() { _tile_release(); }
void zero(int tile) { OF_EACH(tile, _tile_zero) }
void load(int tile, const void* base, long stride) {
#define CALL(digit) _tile_loadd(digit, base, stride)
    OF_EACH(tile, CALL)
#undef CALL
}
void stream_load(int tile, const void* base, long stride) {
#define CALL(digit) _tile_stream_loadd(digit, base, stride)
    OF_EACH(tile, CALL)
#undef CALL
}
void store(int tile, void* base, long stride) {
#define CALL(digit) _tile_stored(digit, base, stride)
    OF_EACH(tile, CALL)
#undef CALL
}
// Tile 0 += tile `a` * tile 6, `a` 4; or 6, which the assembler refuses.
void multiply(int a) {
#if defined(TERCET_TILE_MODEL)
    if (a == 6) _tile_dpbf16ps(0, 6, 6);
#endif
    if (a == 4) _tile_dpbf16ps(0, 4, 6);
}
void multiply_bytes() { _tile_dpbsud(0, 4, 6); }
unsigned set_rounding(unsigned mode) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(mode);
    return before;
}
}
