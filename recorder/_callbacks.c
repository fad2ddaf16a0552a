/* CUPTI's callbacks, without the interpreter: those for buffers, and one that notes when launches are made.

   CUPTI calls them on the job's launching threads and on its own worker, with locks of its own and
   of the driver held. A callback that waits for Python's GIL (up to 5 ms, or for as long as some
   thread keeps it) holds those locks all the while, and every launch behind them waits too. So
   these only move pointers under a mutex that is never held for longer than that; Python fetches
   full buffers when it likes. One pool for the process, and nothing in it is ever freed: CUPTI
   keeps buffers and callbacks beyond the end of a recording.                                     */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Buffer {
    struct Buffer *next;
    uint8_t *memory;
    size_t valid; /* bytes with records, once it came back */
} Buffer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Buffer *free_buffers, *lent, *astray, *taken;
static Buffer *full, **full_end = &full; /* in the order in which they came back */
static size_t buffer_bytes, full_bytes, lent_count;
static size_t most_full_bytes, most_lent;
static unsigned long long requests, refusals;

static void push(Buffer **list, Buffer *buffer) {
    buffer->next = *list;
    *list = buffer;
}

static Buffer *pop(Buffer **list) {
    Buffer *buffer = *list;
    if (buffer) *list = buffer->next;
    return buffer;
}

/* Takes the buffer at `memory` out of `list`; NULL where it is not in there: somebody else's. */
static Buffer *remove_from(Buffer **list, const uint8_t *memory) {
    for (; *list; list = &(*list)->next)
        if ((*list)->memory == memory) return pop(list);
    return NULL;
}

static Buffer *new_buffer(void) {
    Buffer *buffer = malloc(sizeof *buffer);
    if (buffer && !(buffer->memory = malloc(buffer_bytes))) {
        free(buffer);
        buffer = NULL;
    }
    return buffer;
}

/* CUpti_BuffersCallbackRequestFunc. Without a buffer CUPTI drops records and counts them. */
static void on_request(uint8_t **memory, size_t *size, size_t *most_records) {
    Buffer *buffer = NULL;
    *most_records = 0; /* as many as fit */
    pthread_mutex_lock(&lock);
    requests++;
    if (full_bytes < most_full_bytes && lent_count < most_lent) {
        buffer = pop(&free_buffers);
        if (!buffer) buffer = new_buffer();
    }
    if (buffer) {
        push(&lent, buffer);
        lent_count++;
    } else {
        refusals++;
    }
    *memory = buffer ? buffer->memory : NULL;
    *size = buffer ? buffer_bytes : 0;
    pthread_mutex_unlock(&lock);
}

/* CUpti_BuffersCallbackCompleteFunc. */
static void on_complete(void *context, uint32_t stream, uint8_t *memory, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    pthread_mutex_lock(&lock);
    Buffer *buffer = remove_from(&lent, memory);
    if (buffer)
        lent_count--;
    else
        buffer = remove_from(&astray, memory);
    if (buffer) {
        if (valid) {
            buffer->valid = valid;
            buffer->next = NULL;
            *full_end = buffer;
            full_end = &buffer->next;
            full_bytes += valid;
        } else {
            push(&free_buffers, buffer);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* CUpti_CallbackData, as far as it is read here. */
typedef struct {
    int site; /* 0: the call begins */
    const char *function;
    const void *params;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation_data;
    uint32_t correlation;
} Call;

/* CUpti_TimestampCallbackFunc: CUPTI's own default, for where another client has put its own in place. */
static uint64_t on_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* When launch calls began, in a ring: a writer takes a place and marks it complete with its turn, so
   that threads never wait for each other. The reader loses what was overwritten, and counts it. */
enum { PLACES = 1 << 18 }; /* half a second at 500,000 launches a second; 6 MiB */
typedef struct {
    _Atomic uint64_t turn; /* 1 + the number of the launch that it holds; 0 while it is written */
    uint64_t time_ns;
    uint64_t correlation;
} Launch;
static Launch launches[PLACES]; /* costs no memory before it is used */
static _Atomic uint64_t launch_count;
static uint64_t launches_read; /* under the GIL */

/* CUpti_CallbackFunc, for the driver's launch functions. */
static void on_launch(void *user, int domain, uint32_t id, const Call *call) {
    (void)user, (void)domain, (void)id;
    if (call->site != 0) return;
    uint64_t now = on_clock();
    uint64_t number = atomic_fetch_add_explicit(&launch_count, 1, memory_order_relaxed);
    Launch *launch = &launches[number % PLACES];
    atomic_store_explicit(&launch->turn, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    launch->time_ns = now;
    launch->correlation = call->correlation;
    atomic_store_explicit(&launch->turn, number + 1, memory_order_release);
}

/* What subscribes to launches at the job's first NVTX call, before its range opens. */
enum { MOST_IDS = 32 };
static struct {
    int (*subscribe)(void **subscriber, void (*callback)(void *, int, uint32_t, const Call *), void *user);
    int (*enable)(uint32_t enable, void *subscriber, int domain, uint32_t id);
    uint32_t ids[MOST_IDS];
    int count; /* of ids; 0: nothing is to be done */
} armed;
static pthread_mutex_t arming = PTHREAD_MUTEX_INITIALIZER;
static void *nvtx_subscriber;
static int nvtx_began;

/* Under `arming`. */
static void subscribe_for_nvtx(void) {
    enum { DRIVER_API = 1 };
    if (!armed.count || nvtx_subscriber) return;
    if (armed.subscribe(&nvtx_subscriber, on_launch, NULL) != 0) {
        nvtx_subscriber = NULL;
        return;
    }
    for (int i = 0; i < armed.count; i++) armed.enable(1, nvtx_subscriber, DRIVER_API, armed.ids[i]);
}

/* NVTX calls this once, at the process's first call, in the library that NVTX_INJECTION64_PATH names.
   CUPTI, named by NANALYZE_NVTX_CUPTI, takes the calls; this only has launches followed from here on. */
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(void *get_export_table) {
    const char *path = getenv("NANALYZE_NVTX_CUPTI");
    void *cupti = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*next)(void *) = NULL;
    if (cupti) *(void **)&next = dlsym(cupti, "InitializeInjectionNvtx2");
    int result = next ? next(get_export_table) : 0;
    pthread_mutex_lock(&arming);
    nvtx_began = 1;
    subscribe_for_nvtx();
    pthread_mutex_unlock(&arming);
    return result;
}

static PyObject *arm(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long subscribe, enable;
    const char *ids;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "KKy#", &subscribe, &enable, &ids, &bytes)) return NULL;
    if (bytes > (Py_ssize_t)sizeof armed.ids) {
        PyErr_SetString(PyExc_ValueError, "too many callback ids");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS /* CUPTI's locks may be held by a callback in Python, which waits for the GIL */
    pthread_mutex_lock(&arming);
    *(void **)&armed.subscribe = (void *)(uintptr_t)subscribe;
    *(void **)&armed.enable = (void *)(uintptr_t)enable;
    memcpy(armed.ids, ids, bytes);
    armed.count = (int)(bytes / 4);
    if (nvtx_began) subscribe_for_nvtx();
    pthread_mutex_unlock(&arming);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *disarm(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    void *subscriber;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&arming);
    subscriber = nvtx_subscriber;
    nvtx_subscriber = NULL;
    armed.count = 0;
    pthread_mutex_unlock(&arming);
    Py_END_ALLOW_THREADS
    return PyLong_FromVoidPtr(subscriber);
}

static PyObject *nvtx_state(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    int begun, subscribed;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&arming);
    begun = nvtx_began;
    subscribed = nvtx_subscriber != NULL;
    pthread_mutex_unlock(&arming);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ii", begun, subscribed);
}

static PyObject *launch_callback(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong((uintptr_t)on_launch);
}

static PyObject *take_launches(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    uint64_t end = atomic_load(&launch_count), lost = 0, *pairs;
    if (end - launches_read > PLACES) {
        lost = end - launches_read - PLACES;
        launches_read += lost;
    }
    size_t most = (size_t)(end - launches_read), count = 0;
    if (!(pairs = malloc(most * 16 + 1))) return PyErr_NoMemory();
    for (; launches_read < end; launches_read++) {
        Launch *launch = &launches[launches_read % PLACES];
        uint64_t turn = atomic_load_explicit(&launch->turn, memory_order_acquire);
        uint64_t time_ns = launch->time_ns, correlation = launch->correlation;
        atomic_thread_fence(memory_order_acquire);
        if (turn != atomic_load_explicit(&launch->turn, memory_order_relaxed) || turn > launches_read + 1)
            lost++; /* overwritten meanwhile */
        else if (turn != launches_read + 1)
            break; /* its writer is not done yet */
        else
            pairs[2 * count] = time_ns, pairs[2 * count + 1] = correlation, count++;
    }
    PyObject *result = Py_BuildValue("y#K", (char *)pairs, (Py_ssize_t)(count * 16), (unsigned long long)lost);
    free(pairs);
    return result;
}

/* In a forked child: the lock may have been copied locked, and no CUPTI is left to give buffers back. */
static void begin_again(void) {
    pthread_mutex_init(&lock, NULL);
    lent = astray = NULL, lent_count = 0;
    pthread_mutex_init(&arming, NULL);
    armed.count = 0, nvtx_subscriber = NULL;
}

static PyObject *configure(PyObject *module, PyObject *args) {
    (void)module;
    Py_ssize_t size, bytes, count;
    if (!PyArg_ParseTuple(args, "nnn", &size, &bytes, &count)) return NULL;
    if (size <= 0 || (buffer_bytes && buffer_bytes != (size_t)size)) {
        PyErr_SetString(PyExc_ValueError, "the size of buffers is set once");
        return NULL;
    }
    pthread_mutex_lock(&lock);
    buffer_bytes = size, most_full_bytes = bytes, most_lent = count;
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    if (!list) return NULL;
    for (;;) {
        pthread_mutex_lock(&lock);
        Buffer *buffer = pop(&full);
        if (buffer) push(&taken, buffer);
        if (!full) full_end = &full;
        pthread_mutex_unlock(&lock);
        if (!buffer) return list;
        PyObject *view = PyMemoryView_FromMemory((char *)buffer->memory, buffer->valid, PyBUF_WRITE);
        int failed = !view || PyList_Append(list, view);
        Py_XDECREF(view);
        if (failed) break;
    }
    Py_DECREF(list);
    return NULL;
}

static PyObject *give_back(PyObject *module, PyObject *address) {
    (void)module;
    uint8_t *memory = PyLong_AsVoidPtr(address);
    if (!memory && PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    Buffer *buffer = remove_from(&taken, memory);
    if (buffer) {
        full_bytes -= buffer->valid;
        push(&free_buffers, buffer);
    }
    pthread_mutex_unlock(&lock);
    return PyBool_FromLong(buffer != NULL);
}

/* Buffers that CUPTI may have given to another client by mistake: no longer counted, welcome if they come. */
static PyObject *disown(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&lock);
    for (Buffer *buffer; (buffer = pop(&lent));) push(&astray, buffer);
    lent_count = 0;
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static PyObject *reclaim(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    long count = 0;
    pthread_mutex_lock(&lock);
    for (Buffer *buffer; (buffer = pop(&lent)) || (buffer = pop(&astray)); count++) push(&free_buffers, buffer);
    lent_count = 0;
    pthread_mutex_unlock(&lock);
    return PyLong_FromLong(count);
}

/* Runs of records of one kind, found by their sizes; in C since a walk in Python lets go of the GIL on the way. */
static PyObject *find_runs(PyObject *module, PyObject *args) {
    (void)module;
    enum { KINDS = 256 };
    uint32_t size_of[KINDS] = {0}, kind;
    Py_buffer memory, sizes;
    if (!PyArg_ParseTuple(args, "y*y*", &memory, &sizes)) return NULL;
    const uint32_t *pairs = sizes.buf;
    for (Py_ssize_t i = 0; i + 1 < sizes.len / 4; i += 2)
        if (pairs[i] < KINDS) size_of[pairs[i]] = pairs[i + 1];
    const uint8_t *bytes = memory.buf;
    Py_ssize_t at = 0, count = 0, room = 64;
    int64_t *runs = malloc(room * 3 * sizeof *runs), *run = NULL;
    while (runs && at + 4 <= memory.len) {
        memcpy(&kind, bytes + at, 4);
        if (kind >= KINDS || size_of[kind] < 4 || size_of[kind] > memory.len - at) break;
        if (run && run[0] == kind) {
            run[2]++;
        } else {
            if (count == room) {
                int64_t *more = realloc(runs, (room *= 2) * 3 * sizeof *runs);
                if (!more) free(runs);
                if (!(runs = more)) break;
            }
            run = runs + 3 * count++;
            run[0] = kind, run[1] = at, run[2] = 1;
        }
        at += size_of[kind];
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&sizes);
    if (!runs) return PyErr_NoMemory();
    PyObject *result = Py_BuildValue("y#n", (char *)runs, count * 3 * (Py_ssize_t)sizeof *runs, at);
    free(runs);
    return result;
}

static PyObject *counts(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&lock);
    unsigned long long asked = requests, refused = refusals;
    pthread_mutex_unlock(&lock);
    return Py_BuildValue("KK", asked, refused);
}

static PyObject *addresses(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("KKK", (unsigned long long)(uintptr_t)on_request, (unsigned long long)(uintptr_t)on_complete,
                         (unsigned long long)(uintptr_t)on_clock);
}

static PyMethodDef methods[] = {
    {"addresses", addresses, METH_NOARGS, "() -> (int, int, int): the callbacks' addresses: request, complete, clock."},
    {"configure", configure, METH_VARARGS, "(buffer_bytes, most_full_bytes, most_lent): limits of the pool."},
    {"take", take, METH_NOARGS, "() -> list of memoryviews of full buffers, each cut at its valid bytes."},
    {"give_back", give_back, METH_O, "(address) -> bool: a taken buffer may be filled again; False if it was not taken."},
    {"launch_callback", launch_callback, METH_NOARGS, "() -> int: the address of the callback for launch calls."},
    {"arm", arm, METH_VARARGS,
     "(subscribe, enable, ids): addresses of cuptiSubscribe and cuptiEnableCallback, and driver callback ids as\n"
     "uint32: from the first NVTX call on (now, if it has been) launches are noted."},
    {"nvtx_state", nvtx_state, METH_NOARGS,
     "() -> (int, int): whether NVTX calls of this process go to CUPTI by way of this, and whether the first of them\n"
     "has made it subscribe since `arm`."},
    {"disarm", disarm, METH_NOARGS, "() -> int: the subscriber that `arm` led to, or 0; it is the caller's now."},
    {"take_launches", take_launches, METH_NOARGS,
     "() -> (bytes, int): pairs of uint64, when a launch call began (ns, realtime clock) and its correlation id,\n"
     "in the order of the calls; and how many were lost since the last call."},
    {"disown", disown, METH_NOARGS, "() -> None: lent buffers may be lost to another client and no longer count."},
    {"reclaim", reclaim, METH_NOARGS, "() -> int: lent buffers are free again, for a CUPTI that was shut down; how many."},
    {"find_runs", find_runs, METH_VARARGS,
     "(buffer, sizes) -> (bytes, int): runs of equal records as int64 triples of kind, offset and count, and where\n"
     "the first byte is that the sizes (uint32 pairs of kind and size) do not explain."},
    {"counts", counts, METH_NOARGS, "() -> (int, int): requests so far, and those refused."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    (void)module;
    static int once;
    if (!once++) pthread_atfork(NULL, NULL, begin_again);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_callbacks",
    .m_doc = "CUPTI's buffer callbacks, without the interpreter.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__callbacks(void) { return PyModuleDef_Init(&definition); }
