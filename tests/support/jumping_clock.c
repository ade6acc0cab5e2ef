/* Shifts the wall clock of a process by the seconds in a file, for tests of clocks that jump.

   Loaded with LD_PRELOAD. JUMPING_CLOCK names a file of 8 bytes: a signed number in the machine's
   byte order. It is mapped, so a write shifts the clock of all processes at once. As after a real
   jump, monotonic clocks are not affected. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("JUMPING_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) shift_s = mapped;
}

/* A call through dlsym keeps the fast path of the C library. */
typedef int (*clock_gettime_t)(clockid_t, struct timespec *);

int clock_gettime(clockid_t clock, struct timespec *now) {
    static clock_gettime_t real;
    if (!real) real = (clock_gettime_t)dlsym(RTLD_NEXT, "clock_gettime");
    int status = real ? real(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!status && is_wall && shift_s) now->tv_sec += *shift_s;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec found;
    int status = clock_gettime(CLOCK_REALTIME, &found);
    if (!status) *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return status;
}

time_t time(time_t *now) {
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found)) return (time_t)-1;
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
