/* A topic of deduplication IDs: the window of IDs, its older part in runs on disk, snapshots, and kills.
 *
 * docs/internals/model.md says what is modelled and what is not. `python -m model.check window` runs this file.
 *
 * As in producer.pml, all state is in global variables, and the network delivers a copy of any message at any time. The
 * log is the embedded log: a killed sidecar leaves no appends that land later. The rules of owners are in producer.pml.
 */

/* Bounds. Each is a number of … */
#ifndef IDS
#define IDS 3 /* deduplication IDs: 1 to IDS, at most 3; 0 is none */
#endif
#ifndef LOG
#define LOG 6 /* messages in the log */
#endif
#ifndef WINDOW
#define WINDOW 2 /* messages: a copy is recognized while fewer messages than this were stored after the original */
#endif
#ifndef FLIGHT
#define FLIGHT 2 /* appends that are not in the log */
#endif
#ifndef CRASHES
#define CRASHES 1 /* kills */
#endif
#ifndef LOSSES
#define LOSSES 1 /* refusals of the log */
#endif

/* -- The log, which is the only truth. A message's place is its index. */

byte log[LOG];
byte end;
chan flight = [FLIGHT] of { byte };

/* -- Memory. A chunk of the window is one message here. An index is stored as index + 1; 0 is none. */

byte confirmed;        /* messages below it are persisted */
byte window;           /* w: messages below it are forgotten */
byte swept;            /* messages below it are removed from the table */
byte run_end;          /* IDs of messages below it are in runs only, the others in memory */
byte written;          /* there is a complete run up to here, which waits for the snapshot that names it */
byte highest[IDS + 1]; /* for each ID, the highest index in the table and the runs */
bit pending[IDS + 1];  /* the ID is in flight */

/* One frame at a time is looked up in the runs before the step that decides it. */
byte looked_up;  /* its ID, or 0 */
bit found;       /* whether a run had the ID */
byte generation; /* `run_end` at that time */

/* -- The store. Its chunks have the IDs from `chunks` on; its runs have those below `store_run_end`. */

byte store_place, store_window, store_run_end, chunks;
byte crashes, losses;
#ifdef BUG_WINDOW_STORED_IN_TWO_WRITES
byte ids_end;
#define IDS_END ids_end
#else
#define IDS_END store_place
#endif

#define must(condition, text) if :: (condition) :: else -> printf(text); assert(false) fi

hidden byte j, x, is_dup;

inline remember(index) {
  highest[log[index]] = index + 1
}

/* Take what is in flight out: it is not in the log, and never will be. */
inline fail_in_flight() {
  do
  :: len(flight) > 0 ->
     flight?x;
#ifdef BUG_FAILED_ID_COUNTS_AS_STORED
     highest[x] = end;
#endif
     pending[x] = 0
  :: else -> break
  od;
  skip
}

#ifdef BUG_ID_IN_FLIGHT_COUNTS_AS_NEW
#define IS_PENDING(id) false
#else
#define IS_PENDING(id) pending[id]
#endif

proctype Message(byte id) {
  do
  :: d_step { /* look the ID up in the runs */
       looked_up == 0 ->
       looked_up = id;
       found = (highest[id] > 0 && highest[id] <= run_end);
       generation = run_end;
       printf("lookUp(%d)\n", id)
     }
  :: d_step { /* decide, against memory and the same runs */
       looked_up == id ->
       is_dup = highest[id] > window && (highest[id] > run_end || found);
       if
#ifndef BUG_LOOKUP_IN_OTHER_RUNS
       :: generation != run_end -> printf("lookUpAgain(%d)\n", id)
       :: else ->
#else
       :: true ->
#endif
          if
#ifdef BUG_ID_IN_FLIGHT_COUNTS_AS_STORED
          :: IS_PENDING(id) -> printf("answer(%d,Dup)\n", id); must(false, "BROKEN: Dup: the log does not hold the message\n")
#else
          :: IS_PENDING(id) -> printf("answer(%d,Unknown)\n", id)
#endif
          :: !IS_PENDING(id) && is_dup ->
             printf("answer(%d,Dup,index%d)\n", id, highest[id] - 1);
             must(highest[id] <= end && log[highest[id] - 1] == id, "BROKEN: Dup: the log does not hold the message\n")
          :: !IS_PENDING(id) && !is_dup && len(flight) < FLIGHT ->
             printf("admit(%d)\n", id);
             pending[id] = 1;
             flight!id
          :: else /* it does not read the stream on */
          fi
       fi;
       looked_up = 0; found = 0; generation = 0
     }
  od
}

proctype Log() {
  do
  :: d_step { /* an append lands */
       len(flight) > 0 && end < LOG ->
       flight?x;
       printf("land(%d,index%d)\n", x, end);
       j = 0;
       do
       :: j < end ->
          must(log[j] != x || end - 1 - j >= WINDOW, "BROKEN: at most once: the log holds a message twice within the window\n");
          j++
       :: else -> break
       od;
       log[end] = x;
       end++
     }
  :: d_step { /* settle: the oldest message is confirmed */
       confirmed < end ->
       remember(confirmed);
       pending[log[confirmed]] = 0;
       confirmed++;
       printf("confirm(index%d)\n", confirmed - 1)
     }
  :: d_step { /* the log refuses what is in flight */
       len(flight) > 0 && confirmed == end && losses < LOSSES ->
       losses++;
       printf("fail\n");
       fail_in_flight()
     }
  od
}

inline store_ids() {
  store_window = window; store_run_end = written; chunks = written;
  run_end = written
}

proctype Keeper() {
  do
  :: d_step { /* w rises: the oldest ID is forgotten at once, and removed from the table later */
       window < confirmed && confirmed - window - 1 >= WINDOW ->
       window++;
       printf("window(index%d)\n", window)
     }
  :: d_step { /* remove a forgotten ID from the table, unless it was accepted again */
       swept < window ->
#ifdef BUG_SWEEP_REMOVES_NEWER_COPIES
       highest[log[swept]] = 0;
#else
       if
       :: highest[log[swept]] == swept + 1 -> highest[log[swept]] = 0
       :: else
       fi;
#endif
       swept++;
       printf("sweep(index%d)\n", swept - 1)
     }
  :: d_step { /* write a run of the oldest IDs in memory */
       written == run_end && run_end < confirmed ->
       written++;
       printf("run(index%d)\n", written - 1);
#ifdef BUG_RUN_REPLACES_CHUNKS_AT_ONCE
       chunks = written
#else
       skip
#endif
     }
#ifdef BUG_WINDOW_STORED_IN_TWO_WRITES
  :: d_step { store_place < confirmed -> store_place = confirmed; printf("store(place%d)\n", confirmed) }
  :: d_step { ids_end < confirmed -> ids_end = confirmed; store_ids(); printf("store(IDs)\n") }
#else
  :: d_step { /* a snapshot: place, w, chunks, and the names of runs in one write; then the run counts */
       store_place < confirmed || store_run_end < written || store_window < window ->
       store_place = confirmed;
       store_ids();
       printf("store(place%d)\n", store_place)
     }
#endif
  :: d_step { /* kill -9, and the next start: an unnamed run is dropped, what follows the snapshot is read */
       crashes < CRASHES ->
       crashes++;
       printf("kill\n");
       do
       :: len(flight) > 0 -> flight?x
       :: else -> break
       od;
       for (x : 1 .. IDS) { highest[x] = 0; pending[x] = 0 };
       looked_up = 0; found = 0; generation = 0;
       window = store_window; swept = store_window; run_end = store_run_end; written = store_run_end;
       j = window;
       do
       :: j < end ->
          if
          :: j < run_end || j >= chunks && j < IDS_END -> remember(j)
#ifndef BUG_WINDOW_WITHOUT_REPLAY
          :: j >= store_place -> remember(j)
#endif
          :: else /* the store has no record of it */
          fi;
          j++
       :: else -> break
       od;
       confirmed = end
     }
  od
}

init {
  byte id;
  atomic {
    run Log(); run Keeper();
    for (id : 1 .. IDS) { run Message(id) };
    id = 0
  }
}
