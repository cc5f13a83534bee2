// castiron emit --kernel rope_append --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type f16 --isa avx2 --threads 2
// 89 lines, sha256 994b4464bd1afb9d2db90912a5a70fad999adc0114143b621d6578b914220b75
        scf.for %13 = %c0 to %c1 step %c3 {
          %15 = arith.muli %13, %c4 : index
          %16 = vector.load %m1[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %17 = vector.load %m2[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %18 = vector.load %m0[%10, %15] : memref<8x128xf32>, vector<8xf32>
          %19 = arith.addi %15, %c2 : index
          %20 = vector.load %m0[%10, %19] : memref<8x128xf32>, vector<8xf32>
          %21 = arith.mulf %18, %16 : vector<8xf32>
          %22 = arith.mulf %20, %17 : vector<8xf32>
          %23 = arith.subf %21, %22 : vector<8xf32>
          %24 = arith.mulf %20, %16 : vector<8xf32>
          %25 = arith.mulf %18, %17 : vector<8xf32>
          %26 = arith.addf %24, %25 : vector<8xf32>
          vector.store %23, %m7[%10, %15] : memref<8x64xf32>, vector<8xf32>
          %27 = arith.addi %15, %c2 : index
          vector.store %26, %m7[%10, %27] : memref<8x64xf32>, vector<8xf32>
        }
