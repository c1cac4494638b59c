// Loads an NFSv3 server with one kind of call after the other, and prints what it does in a second; for scripts/bench-nfs.
//
//     nfs-load PORT MOUNTPORT EXPORT DEPTH NAMES MEBIBYTES
//
// DEPTH calls are under way at a time, on one connection. NAMES files are created and listed, a file of MEBIBYTES written and read. Each line
// of the output is a kind and a rate: calls, MiB or names in a second. Any failure ends it.
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <sys/time.h>
#include <poll.h>
#include <nfsc/libnfs.h>
#include <nfsc/libnfs-raw.h>
#include <nfsc/libnfs-raw-mount.h>
#include <nfsc/libnfs-raw-nfs.h>

enum { MEBIBYTE = 1 << 20, LISTED_BYTES = 64 << 10 };

static struct rpc_context *rpc;
static struct handle { u_int len; char bytes[64]; } root, file;
static char data[MEBIBYTE];
static int is_done;

static void fail(const char *what) {
    const char *why = rpc_get_error(rpc);
    fprintf(stderr, "nfs-load: %s: %s\n", what, why ? why : "failed");
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void serve(void) {
    struct pollfd fd = {.fd = rpc_get_fd(rpc), .events = rpc_which_events(rpc)};
    if (poll(&fd, 1, 60000) <= 0 || rpc_service(rpc, fd.revents) < 0) fail("the connection");
}

static void keep(struct handle *to, u_int len, const char *bytes) {
    if (len > sizeof to->bytes) fail("a handle is too long");
    to->len = len;
    memcpy(to->bytes, bytes, len);
}

static nfs_fh3 fh(struct handle *of) {
    return (nfs_fh3){.data = {.data_len = of->len, .data_val = of->bytes}};
}

static void connected(struct rpc_context *r, int status, void *answer, void *told) {
    (void)r, (void)answer, (void)told;
    if (status != RPC_STATUS_SUCCESS) fail("connect");
    is_done = 1;
}

static void connect_to(int port, int program) {
    rpc = rpc_init_context();
    is_done = 0;
    if (rpc_connect_port_async(rpc, "127.0.0.1", port, program, 3, connected, NULL)) fail("connect");
    while (!is_done) serve();
}

static void mounted(struct rpc_context *r, int status, void *answer, void *told) {
    (void)r, (void)told;
    mountres3 *res = answer;
    if (status != RPC_STATUS_SUCCESS || res->fhs_status != MNT3_OK) fail("mount");
    keep(&root, res->mountres3_u.mountinfo.fhandle.fhandle3_len, res->mountres3_u.mountinfo.fhandle.fhandle3_val);
    is_done = 1;
}

// Many calls of one kind, `depth` at a time.
static int depth, calls, begun, ended;
static void (*issue)(int);

static void more(void) {
    while (begun < calls && begun - ended < depth) issue(begun++);
}

static void answered(struct rpc_context *r, int status, void *answer, void *told) {
    (void)r;
    // All replies begin with their status.
    if (status != RPC_STATUS_SUCCESS) fail(told);
    if (*(nfsstat3 *)answer != NFS3_OK) {
        fprintf(stderr, "nfs-load: %s: status %d\n", (char *)told, *(nfsstat3 *)answer);
        exit(1);
    }
    if (!strcmp(told, "READ") && ((READ3res *)answer)->READ3res_u.resok.count != MEBIBYTE) fail("a short READ");
    ended++;
    more();
}

static void run(int count, void (*call)(int)) {
    calls = count, begun = ended = 0, issue = call;
    more();
    while (ended < calls) serve();
}

static void measure(const char *kind, int count, void (*call)(int), void (*last)(int)) {
    double from = now();
    run(count, call);
    if (last != NULL) run(1, last);
    printf("%s %.0f\n", kind, count / (now() - from));
    fflush(stdout);
}

static void get_attributes(int i) {
    (void)i;
    GETATTR3args args = {.object = fh(&root)};
    if (rpc_nfs3_getattr_async(rpc, answered, &args, "GETATTR")) fail("GETATTR");
}

static void create(int i) {
    char name[32];
    snprintf(name, sizeof name, "file-%08d", i);
    CREATE3args args = {.where = {fh(&root), name}, .how = {.mode = GUARDED}};
    args.how.createhow3_u.g_obj_attributes.mode = (set_mode3){.set_it = 1, .set_mode3_u = {0644}};
    if (rpc_nfs3_create_async(rpc, answered, &args, "CREATE")) fail("CREATE");
}

static void created(struct rpc_context *r, int status, void *answer, void *told) {
    CREATE3res *res = answer;
    if (status == RPC_STATUS_SUCCESS && res->status == NFS3_OK) {
        nfs_fh3 *made = &res->CREATE3res_u.resok.obj.post_op_fh3_u.handle;
        keep(&file, made->data.data_len, made->data.data_val);
    }
    answered(r, status, answer, told);
}

static void create_large(int i) {
    (void)i;
    CREATE3args args = {.where = {fh(&root), "large"}, .how = {.mode = GUARDED}};
    if (rpc_nfs3_create_async(rpc, created, &args, "CREATE")) fail("CREATE");
}

static void write_part(int i) {
    WRITE3args args = {.file = fh(&file), .offset = (uint64_t)i * MEBIBYTE, .count = MEBIBYTE, .stable = UNSTABLE};
    args.data.data_len = MEBIBYTE, args.data.data_val = data;
    if (rpc_nfs3_write_async(rpc, answered, &args, "WRITE")) fail("WRITE");
}

static void commit(int i) {
    (void)i;
    COMMIT3args args = {.file = fh(&file)};
    if (rpc_nfs3_commit_async(rpc, answered, &args, "COMMIT")) fail("COMMIT");
}

static void read_part(int i) {
    READ3args args = {.file = fh(&file), .offset = (uint64_t)i * MEBIBYTE, .count = MEBIBYTE};
    if (rpc_nfs3_read_async(rpc, answered, &args, "READ")) fail("READ");
}

// A listing is one call after the other: each begins where the last one ended.
static uint64_t cookie;
static cookieverf3 verifier;
static int names;
static int is_end;

static void listed(struct rpc_context *r, int status, void *answer, void *told) {
    READDIRPLUS3res *res = answer;
    if (status == RPC_STATUS_SUCCESS && res->status == NFS3_OK) {
        for (entryplus3 *e = res->READDIRPLUS3res_u.resok.reply.entries; e != NULL; e = e->nextentry) {
            cookie = e->cookie;
            if (!strncmp(e->name, "file-", 5)) {
                names++;
                if (!e->name_attributes.attributes_follow || !e->name_handle.handle_follows) fail("a name without its file");
            }
        }
        memcpy(verifier, res->READDIRPLUS3res_u.resok.cookieverf, sizeof verifier);
        is_end = res->READDIRPLUS3res_u.resok.reply.eof;
    }
    answered(r, status, answer, told);
}

static void list_part(int i) {
    (void)i;
    READDIRPLUS3args args = {.dir = fh(&root), .cookie = cookie, .dircount = LISTED_BYTES, .maxcount = LISTED_BYTES};
    memcpy(args.cookieverf, verifier, sizeof verifier);
    if (rpc_nfs3_readdirplus_async(rpc, listed, &args, "READDIRPLUS")) fail("READDIRPLUS");
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    int port = atoi(argv[1]), mount_port = atoi(argv[2]), count = atoi(argv[5]), mebibytes = atoi(argv[6]);
    depth = atoi(argv[4]);
    for (int i = 0; i < MEBIBYTE; i++) data[i] = (char)rand();
    connect_to(mount_port, MOUNT_PROGRAM);
    is_done = 0;
    if (rpc_mount3_mnt_async(rpc, mounted, argv[3], NULL)) fail("mount");
    while (!is_done) serve();
    rpc_destroy_context(rpc);
    connect_to(port, NFS_PROGRAM);

    run(1000, get_attributes);
    measure("getattr", 30000, get_attributes, NULL);
    measure("create", count, create, NULL);
    double from = now();
    while (!is_end) run(1, list_part);
    if (names != count) fail("the listing is not whole");
    printf("readdirplus %.0f\n", names / (now() - from));
    run(1, create_large);
    measure("write", mebibytes, write_part, commit);
    measure("read", mebibytes, read_part, NULL);
    return 0;
}
