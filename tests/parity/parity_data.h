/* ParityData: a small data set in a folder of its own, written for one test.
 * Threading: one thread.
 */
#ifndef TESTS_PARITY_PARITY_DATA_H
#define TESTS_PARITY_PARITY_DATA_H

enum {
    PARITY_PATH_BYTES = 256
};

typedef struct ParityData {
    char folder[PARITY_PATH_BYTES];
    char shard[PARITY_PATH_BYTES];
} ParityData;

/* A tar with `num` samples; sample i has images[i] images of uneven sizes, clips[i] clips of uneven
 * lengths (NULL: none), and a caption of a length of its own. */
void parity_data_write(ParityData *data, const int *images, const int *clips, int num);
/* Spoils the first image, whose header stays good. */
void parity_data_spoil(const ParityData *data);
/* Removes the folder with all that is in it. */
void parity_data_remove(ParityData *data);

#endif
