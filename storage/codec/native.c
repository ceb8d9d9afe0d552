/* The loops over bytes, in C (_native.pyi): over the records of a batch `walk`, `fields`, `headers`
and `write`, over keys `murmur2` and `murmur2_column`.

plain_byte_loops.py has the same functions in Python, for an installation without a C compiler; tests
compare each result of the two. For bytes that are no records, a function returns the reason, and
records.py raises the error: nothing reads the bytes again, because any client may send such bytes.

The bytes come from any client. A byte is read only if its place is before the end of its record,
and each record ends within the buffer. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* For an int and a long: the most bytes of a varint, and the largest last byte of one that has so
many. The last byte of an int has the upper 4 of 32 bits, that of a long the last of 64. */
#define INT_BYTES_MAX 5
#define INT_LAST_MAX 15
#define LONG_BYTES_MAX 10
#define LONG_LAST_MAX 1
/* The most bytes of the numbers of a record that this module writes: length, attributes, timestamp
delta, offset delta, key size, value size. */
#define NUMBERS_BYTES_MAX (5 + 1 + 10 + 10 + 5 + 5)
/* A header has at least the sizes of its name and its value. */
#define HEADER_BYTES_MIN 2
/* From this number of records on, `fields`, `headers` and `write` release the GIL. */
#define RECORDS_WITHOUT_GIL 500
/* From this number of bytes on, functions release the GIL. They do not for fewer, because the event
loop calls them, and would wait for the GIL. */
#define BYTES_WITHOUT_GIL (1 << 20)

/* ---- reading */

/* Why bytes are no records, in the order of REASONS in records.py. */
typedef enum {
    CUT_OFF,
    STRAY,
    WRONG_LENGTH,
    NEGATIVE,
    TOO_LONG,
    TOO_MANY_HEADERS,
    WRONG_NAME,
    WRONG_OFFSET,
} Reason;

typedef struct {
    const uint8_t *raw;
    Py_ssize_t at;
    Reason reason;
} Cursor;

typedef struct {
    int64_t timestamp_delta;
    Py_ssize_t key_at, key_size, value_at, value_size, headers_at, headers, stop;
} Record;

static inline bool refuse(Cursor *cursor, Reason reason)
{
    cursor->reason = reason;
    return false;
}

static inline int64_t number_of(uint64_t zigzag)
{
    return (int64_t)(zigzag >> 1) ^ -(int64_t)(zigzag & 1);
}

/* Do `read_number` for a number of any length. */
static bool read_long_number(
    Cursor *cursor, Py_ssize_t stop, int bytes_max, uint8_t last_max, int64_t *number)
{
    uint64_t zigzag = 0;
    for (int position = 0; position < bytes_max; position++) {
        if (cursor->at >= stop)
            return refuse(cursor, CUT_OFF);
        uint8_t byte = cursor->raw[cursor->at++];
        zigzag |= (uint64_t)(byte & 127) << (7 * position);
        if (byte < 128) {
            if (position == bytes_max - 1 && byte > last_max)
                break;
            *number = number_of(zigzag);
            return true;
        }
    }
    return refuse(cursor, TOO_LONG);
}

/* Read a zigzag varint before `stop`; INT or LONG is the `kind`. Most have one or two bytes. */
#define READ_NUMBER(cursor, stop, kind, number) \
    read_number(cursor, stop, kind##_BYTES_MAX, kind##_LAST_MAX, number)
static inline bool read_number(
    Cursor *cursor, Py_ssize_t stop, int bytes_max, uint8_t last_max, int64_t *number)
{
    Py_ssize_t left = stop - cursor->at;
    const uint8_t *next = cursor->raw + cursor->at;
    if (left > 0 && next[0] < 128) {
        cursor->at++;
        *number = number_of(next[0]);
        return true;
    }
    if (left > 1 && next[1] < 128) {
        cursor->at += 2;
        *number = number_of((uint64_t)(next[0] & 127) | (uint64_t)next[1] << 7);
        return true;
    }
    return read_long_number(cursor, stop, bytes_max, last_max, number);
}

/* Read a size and go behind so many bytes; a size of -1 is a null, if there may be one. */
static inline bool read_octets(
    Cursor *cursor, Py_ssize_t stop, bool may_be_null, Py_ssize_t *at, Py_ssize_t *size)
{
    int64_t number;
    if (!READ_NUMBER(cursor, stop, INT, &number))
        return false;
    *at = cursor->at;
    *size = (Py_ssize_t)number;
    if (number < 0)
        return may_be_null && number == -1 ? true : refuse(cursor, NEGATIVE);
    if (number > stop - cursor->at)
        return refuse(cursor, CUT_OFF);
    cursor->at += (Py_ssize_t)number;
    return true;
}

/* Read a record up to its headers. The next record begins at `record->stop`. */
static inline bool read_record(
    Cursor *cursor, Py_ssize_t end, int64_t offset_delta, Record *record)
{
    int64_t length, delta, headers;
    if (!READ_NUMBER(cursor, end, INT, &length))
        return false;
    if (length < 1 || length > end - cursor->at)
        return refuse(cursor, length ? CUT_OFF : WRONG_LENGTH);
    Py_ssize_t stop = record->stop = cursor->at + (Py_ssize_t)length;
    cursor->at++; /* the attributes have no meaning */
    if (!READ_NUMBER(cursor, stop, LONG, &record->timestamp_delta))
        return false;
    if (!READ_NUMBER(cursor, stop, INT, &delta))
        return false;
    if (delta != offset_delta)
        return refuse(cursor, WRONG_OFFSET);
    if (!read_octets(cursor, stop, true, &record->key_at, &record->key_size))
        return false;
    if (!read_octets(cursor, stop, true, &record->value_at, &record->value_size))
        return false;
    if (!READ_NUMBER(cursor, stop, INT, &headers))
        return false;
    record->headers_at = cursor->at;
    record->headers = (Py_ssize_t)headers;
    if (headers < 0)
        return refuse(cursor, NEGATIVE);
    /* Before a loop or an array of so many headers: they cannot be in fewer bytes. */
    if (headers > (stop - cursor->at) / HEADER_BYTES_MIN)
        return refuse(cursor, CUT_OFF);
    return headers > 0 || cursor->at == stop ? true : refuse(cursor, WRONG_LENGTH);
}

/* Return whether the bytes are UTF-8, without surrogates. */
static bool is_utf8(const uint8_t *text, Py_ssize_t size)
{
    Py_ssize_t at = 0;
    while (at < size) {
        uint64_t eight;
        if (size - at >= (Py_ssize_t)sizeof(eight)) {
            memcpy(&eight, text + at, sizeof(eight));
            if (!(eight & UINT64_C(0x8080808080808080))) {
                at += (Py_ssize_t)sizeof(eight);
                continue;
            }
        }
        uint8_t first = text[at++];
        if (first < 0x80)
            continue;
        if (first < 0xC2 || first > 0xF4)
            return false;
        int following = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
        if (following > size - at)
            return false;
        /* The second byte excludes long forms, surrogates, and numbers above 0x10FFFF. */
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (text[at] < low || text[at] > high)
            return false;
        for (at++; --following; at++)
            if ((text[at] & 0xC0) != 0x80)
                return false;
    }
    return true;
}

typedef struct {
    Py_ssize_t name_at, name_size, value_at, value_size;
} Header;

/* Read a header that ends at `stop` or before. Its name must be UTF-8. */
static inline bool read_header(Cursor *cursor, Py_ssize_t stop, Header *header)
{
    if (!read_octets(cursor, stop, false, &header->name_at, &header->name_size))
        return false;
    if (!is_utf8(cursor->raw + header->name_at, header->name_size))
        return refuse(cursor, WRONG_NAME);
    return read_octets(cursor, stop, true, &header->value_at, &header->value_size);
}

/* Read the headers of a record, and add their bytes to `content`. */
static bool read_headers(Cursor *cursor, const Record *record, int64_t *content)
{
    for (Py_ssize_t index = 0; index < record->headers; index++) {
        Header header;
        if (!read_header(cursor, record->stop, &header))
            return false;
        *content += header.name_size + (header.value_size > 0 ? header.value_size : 0);
    }
    return cursor->at == record->stop ? true : refuse(cursor, WRONG_LENGTH);
}

static PyObject *refusal(const Cursor *cursor, Py_ssize_t index)
{
    return Py_BuildValue("(in)", (int)cursor->reason, index);
}

static PyObject *walk(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "walk takes raw, start, count and headers_max");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), count = PyLong_AsSsize_t(args[2]);
    Py_ssize_t headers_left = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer raw;
    if (PyObject_GetBuffer(args[0], &raw, PyBUF_SIMPLE) < 0)
        return NULL;
    Cursor cursor = {raw.buf, start, CUT_OFF};
    Py_ssize_t headers_max = headers_left;
    int64_t first = 0, last = 0, content = 0;
    bool has_null_key = false, is_good = start >= 0 && start <= raw.len && count > 0;
    Py_ssize_t index = 0;
    PyThreadState *state = raw.len >= BYTES_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    for (; is_good && index < count; index++) {
        Record record;
        is_good = read_record(&cursor, raw.len, index, &record);
        if (is_good && record.headers > headers_left)
            is_good = refuse(&cursor, TOO_MANY_HEADERS);
        if (is_good && record.headers) {
            headers_left -= record.headers;
            is_good = read_headers(&cursor, &record, &content);
        }
        if (!is_good)
            break;
        if (!index || record.timestamp_delta < first)
            first = record.timestamp_delta;
        if (!index || record.timestamp_delta > last)
            last = record.timestamp_delta;
        has_null_key = has_null_key || record.key_size < 0;
        content += (record.key_size > 0 ? record.key_size : 0)
            + (record.value_size > 0 ? record.value_size : 0);
    }
    if (is_good && cursor.at != raw.len)
        is_good = refuse(&cursor, STRAY);
    if (state != NULL)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&raw);
    if (!is_good)
        return refusal(&cursor, index);
    return Py_BuildValue("LLLLO", (long long)first, (long long)last, (long long)content,
        (long long)(headers_max - headers_left), has_null_key ? Py_True : Py_False);
}

/* ---- buffers of arguments */

/* Get buffers of the arguments; release those that there are if one has none. */
static bool get_buffers(PyObject *const *args, Py_buffer *buffers, int count, int writable)
{
    for (int index = 0; index < count; index++) {
        int flags = index < writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(args[index], &buffers[index], flags) < 0) {
            while (index--)
                PyBuffer_Release(&buffers[index]);
            return false;
        }
    }
    return true;
}

static void release_buffers(Py_buffer *buffers, int count)
{
    while (count--)
        PyBuffer_Release(&buffers[count]);
}

/* The columns of `fields`, in its order. */
enum { KEY_AT, KEY_SIZE, VALUE_AT, VALUE_SIZE, HEADERS_AT, HEADERS, STOP, PLACES };

/* Fill the columns for the `count` records of a batch; count those that are good in `done`. */
static bool fill_fields(
    Cursor *cursor, Py_ssize_t end, Py_ssize_t count, Py_ssize_t *done, int64_t *deltas,
    int32_t *places, Py_ssize_t rows)
{
    for (; *done < count; ++*done) {
        Record record;
        Py_ssize_t index = *done;
        if (!read_record(cursor, end, index, &record))
            return false;
        cursor->at = record.stop;
        deltas[index] = record.timestamp_delta;
        places[KEY_AT * rows + index] = (int32_t)record.key_at;
        places[KEY_SIZE * rows + index] = (int32_t)record.key_size;
        places[VALUE_AT * rows + index] = (int32_t)record.value_at;
        places[VALUE_SIZE * rows + index] = (int32_t)record.value_size;
        places[HEADERS_AT * rows + index] = (int32_t)record.headers_at;
        places[HEADERS * rows + index] = (int32_t)record.headers;
        places[STOP * rows + index] = (int32_t)record.stop;
    }
    return cursor->at == end ? true : refuse(cursor, STRAY);
}

static PyObject *fields(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 6) {
        PyErr_SetString(
            PyExc_TypeError, "fields takes deltas, places, raw, starts, ends and counts");
        return NULL;
    }
    Py_buffer buffers[6];
    if (!get_buffers(args, buffers, 6, 2))
        return NULL;
    int64_t *deltas = buffers[0].buf;
    int32_t *places = buffers[1].buf;
    const Py_buffer *raw = &buffers[2];
    const int64_t *starts = buffers[3].buf, *ends = buffers[4].buf, *counts = buffers[5].buf;
    Py_ssize_t rows = buffers[0].len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t batches = buffers[3].len / (Py_ssize_t)sizeof(int64_t);
    bool is_good = raw->len <= INT32_MAX && buffers[4].len == buffers[3].len
        && buffers[5].len == buffers[3].len
        && buffers[1].len == rows * PLACES * (Py_ssize_t)sizeof(int32_t);
    PyThreadState *state = rows >= RECORDS_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    Cursor cursor = {raw->buf, 0, CUT_OFF};
    Py_ssize_t row = 0, done = 0;
    for (Py_ssize_t batch = 0; is_good && batch < batches; batch++) {
        int64_t count = counts[batch];
        done = 0;
        is_good = starts[batch] >= 0 && starts[batch] <= ends[batch] && ends[batch] <= raw->len
            && count > 0 && count <= rows - row;
        if (!is_good)
            break;
        cursor.at = (Py_ssize_t)starts[batch];
        is_good = fill_fields(&cursor, (Py_ssize_t)ends[batch], (Py_ssize_t)count, &done,
            deltas + row, places + row, rows);
        row += done;
    }
    if (state != NULL)
        PyEval_RestoreThread(state);
    is_good = is_good && row == rows;
    release_buffers(buffers, 6);
    return is_good ? Py_NewRef(Py_None) : refusal(&cursor, done);
}

/* The columns of `headers`, in its order. */
enum { NAME_AT, NAME_SIZE, CONTENT_AT, CONTENT_SIZE, HEADER_PLACES };

static PyObject *headers_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "headers takes places, raw, starts, counts and ends");
        return NULL;
    }
    Py_buffer buffers[5];
    if (!get_buffers(args, buffers, 5, 1))
        return NULL;
    int32_t *places = buffers[0].buf;
    const Py_buffer *raw = &buffers[1];
    const int32_t *starts = buffers[2].buf, *counts = buffers[3].buf, *ends = buffers[4].buf;
    Py_ssize_t total = buffers[0].len / (HEADER_PLACES * (Py_ssize_t)sizeof(int32_t));
    Py_ssize_t records = buffers[2].len / (Py_ssize_t)sizeof(int32_t);
    bool is_good = raw->len <= INT32_MAX && buffers[3].len == buffers[2].len
        && buffers[4].len == buffers[2].len;
    PyThreadState *state = total >= RECORDS_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    Cursor cursor = {raw->buf, 0, CUT_OFF};
    Py_ssize_t record = 0, done = 0;
    for (; is_good && record < records; record++) {
        Py_ssize_t left = counts[record];
        is_good = starts[record] >= 0 && starts[record] <= ends[record]
            && ends[record] <= raw->len && left >= 0 && left <= total - done;
        if (!is_good)
            break;
        cursor.at = starts[record];
        for (; is_good && left; left--) {
            Header header;
            is_good = read_header(&cursor, ends[record], &header);
            if (!is_good)
                break;
            places[NAME_AT * total + done] = (int32_t)header.name_at;
            places[NAME_SIZE * total + done] = (int32_t)header.name_size;
            places[CONTENT_AT * total + done] = (int32_t)header.value_at;
            places[CONTENT_SIZE * total + done] = (int32_t)header.value_size;
            done++;
        }
        if (is_good && cursor.at != ends[record])
            is_good = refuse(&cursor, WRONG_LENGTH);
        if (!is_good)
            break;
    }
    if (state != NULL)
        PyEval_RestoreThread(state);
    is_good = is_good && done == total;
    release_buffers(buffers, 5);
    return is_good ? Py_NewRef(Py_None) : refusal(&cursor, record);
}

/* ---- writing */

/* A binary column of Arrow. `valid` has a 1 bit for each row that is not null. It is NULL if no row
is null. `bounds` are int32, which are not aligned if the column is a part of an object. */
typedef struct {
    const uint8_t *valid, *bounds, *data;
    Py_ssize_t first, bits, bound_count, size;
} Column;

/* Find a row; its size is -1 if it is null. */
static inline bool find(const Column *column, Py_ssize_t row, const uint8_t **data, int64_t *size)
{
    Py_ssize_t at = column->first + row;
    if (column->valid != NULL) {
        if (at >= column->bits)
            return false;
        if (!(column->valid[at >> 3] >> (at & 7) & 1)) {
            *data = NULL;
            *size = -1;
            return true;
        }
    }
    if (at + 1 >= column->bound_count)
        return false;
    int32_t ends[2];
    memcpy(ends, column->bounds + at * (Py_ssize_t)sizeof(int32_t), sizeof(ends));
    if (ends[0] < 0 || ends[0] > ends[1] || ends[1] > column->size)
        return false;
    *data = column->data + ends[0];
    *size = ends[1] - ends[0];
    return true;
}

static inline uint64_t zigzag_of(int64_t number)
{
    return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
}

static inline Py_ssize_t number_size(uint64_t zigzag)
{
    Py_ssize_t size = 1;
    while (zigzag >>= 7)
        size++;
    return size;
}

static inline uint8_t *put_number(uint8_t *to, uint64_t zigzag)
{
    while (zigzag > 127) {
        *to++ = (uint8_t)(zigzag | 128);
        zigzag >>= 7;
    }
    *to++ = (uint8_t)zigzag;
    return to;
}

static inline uint8_t *put_octets(uint8_t *to, const uint8_t *data, int64_t size)
{
    if (size > 0) {
        memcpy(to, data, (size_t)size);
        to += size;
    }
    return to;
}

/* Write the rows; return the bytes that they take, or -1 if a column or `out` is too small. */
static Py_ssize_t write_rows(
    uint8_t *out, Py_ssize_t room, int32_t *bounds, Py_ssize_t rows,
    const int64_t *timestamp_deltas, const int64_t *offset_deltas, const Column *keys,
    const Column *values, const Column *headers)
{
    static const uint8_t no_headers[1] = {0};
    uint8_t *to = out;
    bounds[0] = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        const uint8_t *key, *value, *behind = no_headers;
        int64_t key_size, value_size, behind_size = sizeof(no_headers);
        if (!find(keys, row, &key, &key_size) || !find(values, row, &value, &value_size))
            return -1;
        if (headers != NULL && (!find(headers, row, &behind, &behind_size) || behind_size < 1))
            return -1;
        uint64_t timestamp = zigzag_of(timestamp_deltas[row]);
        uint64_t offset = zigzag_of(offset_deltas[row]);
        uint64_t key_number = zigzag_of(key_size), value_number = zigzag_of(value_size);
        int64_t content = (key_size > 0 ? key_size : 0) + (value_size > 0 ? value_size : 0)
            + behind_size;
        if (content > room - (to - out) - NUMBERS_BYTES_MAX)
            return -1;
        int64_t length = 1 + number_size(timestamp) + number_size(offset)
            + number_size(key_number) + number_size(value_number) + content;
        to = put_number(to, zigzag_of(length));
        *to++ = 0; /* attributes */
        to = put_number(to, timestamp);
        to = put_number(to, offset);
        to = put_octets(put_number(to, key_number), key, key_size);
        to = put_octets(put_number(to, value_number), value, value_size);
        to = put_octets(to, behind, behind_size);
        bounds[row + 1] = (int32_t)(to - out);
    }
    return to - out;
}

/* Read a column from (validity or None, bounds, data or None, first). The caller releases the
buffers that this adds. */
static bool get_column(PyObject *from, Column *column, Py_buffer *buffers, int *count)
{
    const void *parts[3] = {NULL, NULL, NULL};
    Py_ssize_t sizes[3] = {0, 0, 0};
    for (int index = 0; index < 3; index++) {
        PyObject *part = PyTuple_GetItem(from, index);
        if (part == NULL)
            return false;
        if (part == Py_None)
            continue;
        if (PyObject_GetBuffer(part, &buffers[*count], PyBUF_SIMPLE) < 0)
            return false;
        parts[index] = buffers[*count].buf;
        sizes[index] = buffers[*count].len;
        ++*count;
    }
    PyObject *first = PyTuple_GetItem(from, 3);
    column->first = first == NULL ? -1 : PyLong_AsSsize_t(first);
    if (PyErr_Occurred())
        return false;
    column->bound_count = sizes[1] / (Py_ssize_t)sizeof(int32_t);
    if (column->first < 0 || column->first >= column->bound_count) {
        PyErr_SetString(PyExc_ValueError, "a column has no bounds for its first row");
        return false;
    }
    column->valid = parts[0];
    column->bounds = parts[1];
    column->data = parts[2] == NULL ? (const uint8_t *)"" : parts[2];
    column->bits = sizes[0] * 8;
    column->size = sizes[2];
    return true;
}

static PyObject *write_records(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError,
            "write takes out, bounds, timestamp deltas, offset deltas, keys, values and headers");
        return NULL;
    }
    Py_buffer buffers[4 + 3 * 3];
    int count = 4;
    if (!get_buffers(args, buffers, count, 2))
        return NULL;
    PyObject *result = NULL;
    Column keys, values, headers;
    bool has_headers = args[6] != Py_None;
    if (!get_column(args[4], &keys, buffers, &count)
        || !get_column(args[5], &values, buffers, &count)
        || (has_headers && !get_column(args[6], &headers, buffers, &count)))
        goto end;
    Py_ssize_t rows = buffers[2].len / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t written = -1;
    if (buffers[3].len == buffers[2].len && buffers[0].len <= INT32_MAX
        && buffers[1].len == (rows + 1) * (Py_ssize_t)sizeof(int32_t)) {
        PyThreadState *state = rows >= RECORDS_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
        written = write_rows(buffers[0].buf, buffers[0].len, buffers[1].buf, rows, buffers[2].buf,
            buffers[3].buf, &keys, &values, has_headers ? &headers : NULL);
        if (state != NULL)
            PyEval_RestoreThread(state);
    }
    if (written < 0)
        PyErr_SetString(PyExc_ValueError, "columns and buffers do not fit each other");
    else
        result = PyLong_FromSsize_t(written);
end:
    release_buffers(buffers, count);
    return result;
}

/* ---- hashes of keys */

static uint32_t word(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16
        | (uint32_t)bytes[3] << 24;
}

/* Kafka's murmur2: org.apache.kafka.common.utils.Utils.murmur2. */
static uint32_t murmur2_of(const uint8_t *key, Py_ssize_t size)
{
    const uint32_t m = 0x5bd1e995;
    uint32_t hash = 0x9747b28c ^ (uint32_t)size;
    for (; size >= 4; key += 4, size -= 4) {
        uint32_t k = word(key) * m;
        hash = hash * m ^ (k ^ k >> 24) * m;
    }
    for (Py_ssize_t index = 0; index < size; index++)
        hash ^= (uint32_t)key[index] << 8 * index;
    if (size)
        hash *= m;
    hash = (hash ^ hash >> 13) * m;
    return hash ^ hash >> 15;
}

static PyObject *murmur2(PyObject *self, PyObject *key)
{
    (void)self;
    Py_buffer buffer;
    if (PyObject_GetBuffer(key, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    PyThreadState *state = buffer.len >= BYTES_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    uint32_t hash = murmur2_of(buffer.buf, buffer.len);
    if (state != NULL)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLong(hash);
}

static PyObject *murmur2_column(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "murmur2_column takes hashes, bounds and data");
        return NULL;
    }
    Py_buffer buffers[3];
    if (!get_buffers(args, buffers, 3, 1))
        return NULL;
    uint32_t *hashes = buffers[0].buf;
    const int32_t *bounds = buffers[1].buf;
    const uint8_t *data = buffers[2].buf;
    Py_ssize_t rows = buffers[0].len / (Py_ssize_t)sizeof(uint32_t);
    bool is_good = buffers[1].len == (rows + 1) * (Py_ssize_t)sizeof(int32_t);
    PyThreadState *state = buffers[2].len >= BYTES_WITHOUT_GIL ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t row = 0; is_good && row < rows; row++) {
        int32_t start = bounds[row], end = bounds[row + 1];
        is_good = 0 <= start && start <= end && end <= buffers[2].len;
        if (is_good)
            hashes[row] = murmur2_of(data + start, end - start);
    }
    if (state != NULL)
        PyEval_RestoreThread(state);
    release_buffers(buffers, 3);
    if (!is_good) {
        PyErr_SetString(PyExc_ValueError, "the bounds of the keys are not those of the data");
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, NULL},
    {"fields", (PyCFunction)(void (*)(void))fields, METH_FASTCALL, NULL},
    {"headers", (PyCFunction)(void (*)(void))headers_of, METH_FASTCALL, NULL},
    {"write", (PyCFunction)(void (*)(void))write_records, METH_FASTCALL, NULL},
    {"murmur2", murmur2, METH_O, NULL},
    {"murmur2_column", (PyCFunction)(void (*)(void))murmur2_column, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* Add 1 with each change of this file that changes what a function takes, returns or accepts, and
the same in byte_loops.py: a build of other code is then not used. */
#define VERSION 3

static int execute(PyObject *self) { return PyModule_AddIntConstant(self, "VERSION", VERSION); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_native",
    "The loops over bytes (see _native.pyi).",
    0,
    methods,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
