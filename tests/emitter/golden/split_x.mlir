// castiron emit --kernel split_x --shape 64 --codec q4_1 --tokens 2 --isa amx --threads 2
// 92 lines, sha256 536c58b0546f700bed3a79d36ef102bb6830b5f31cc0c8e9221c06c559b24a4b
        scf.for %9 = %c0 to %c1 step %c2 {
          %11 = arith.muli %9, %c3 : index
          %12 = vector.load %m0[%8, %11] : memref<2x64xf32>, vector<16xf32>
          %13 = arith.muli %9, %c3 : index
          %14 = arith.addi %13, %c4 : index
          %15 = vector.load %m0[%8, %14] : memref<2x64xf32>, vector<16xf32>
          %16 = arith.addf %12, %15 : vector<16xf32>
          %17 = vector.shuffle %16, %16 [0, 1, 2, 3, 4, 5, 6, 7] : vector<16xf32>, vector<16xf32>
          %18 = vector.shuffle %16, %16 [8, 9, 10, 11, 12, 13, 14, 15] : vector<16xf32>, vector<16xf32>
          %19 = arith.addf %17, %18 : vector<8xf32>
          %20 = vector.shuffle %19, %19 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
          %21 = vector.shuffle %19, %19 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
          %22 = arith.addf %20, %21 : vector<4xf32>
          %23 = vector.shuffle %22, %22 [0, 1] : vector<4xf32>, vector<4xf32>
          %24 = vector.shuffle %22, %22 [2, 3] : vector<4xf32>, vector<4xf32>
          %25 = arith.addf %23, %24 : vector<2xf32>
          %26 = vector.shuffle %25, %25 [0] : vector<2xf32>, vector<2xf32>
          %27 = vector.shuffle %25, %25 [1] : vector<2xf32>, vector<2xf32>
          %28 = arith.addf %26, %27 : vector<1xf32>
          %29 = vector.extract %28[0] : f32 from vector<1xf32>
          memref.store %29, %m2[%8, %9] : memref<2x2xf32>
          %30 = vector.shuffle %12, %15 [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30] : vector<16xf32>, vector<16xf32>
          %31 = vector.shuffle %12, %15 [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31] : vector<16xf32>, vector<16xf32>
          %32 = vector.bitcast %30 : vector<16xf32> to vector<16xi32>
          %33 = vector.bitcast %31 : vector<16xf32> to vector<16xi32>
          %34 = arith.shrui %32, %c5 : vector<16xi32>
          %35 = arith.andi %33, %c6 : vector<16xi32>
          %36 = arith.ori %34, %35 : vector<16xi32>
          %37 = arith.shli %36, %c5 : vector<16xi32>
          %38 = vector.bitcast %37 : vector<16xi32> to vector<16xf32>
          %39 = arith.andi %36, %c6 : vector<16xi32>
          %40 = vector.bitcast %39 : vector<16xi32> to vector<16xf32>
          %41 = arith.subf %30, %38 : vector<16xf32>
          %42 = arith.subf %31, %40 : vector<16xf32>
          %43 = vector.bitcast %41 : vector<16xf32> to vector<16xi32>
          %44 = vector.bitcast %42 : vector<16xf32> to vector<16xi32>
          %45 = arith.shrui %43, %c5 : vector<16xi32>
          %46 = arith.andi %44, %c6 : vector<16xi32>
          %47 = arith.ori %45, %46 : vector<16xi32>
          %48 = arith.shli %47, %c5 : vector<16xi32>
          %49 = vector.bitcast %48 : vector<16xi32> to vector<16xf32>
          %50 = arith.andi %47, %c6 : vector<16xi32>
          %51 = vector.bitcast %50 : vector<16xi32> to vector<16xf32>
          %52 = arith.subf %41, %49 : vector<16xf32>
          %53 = arith.subf %42, %51 : vector<16xf32>
          %54 = vector.bitcast %52 : vector<16xf32> to vector<16xi32>
          %55 = vector.bitcast %53 : vector<16xf32> to vector<16xi32>
          %56 = arith.shrui %54, %c5 : vector<16xi32>
          %57 = arith.andi %55, %c6 : vector<16xi32>
          %58 = arith.ori %56, %57 : vector<16xi32>
          vector.store %36, %m1[%c0, %1, %9, %6, %c0] : memref<3x1x2x2x16xi32>, vector<16xi32>
          vector.store %47, %m1[%c2, %1, %9, %6, %c0] : memref<3x1x2x2x16xi32>, vector<16xi32>
          vector.store %58, %m1[%c1, %1, %9, %6, %c0] : memref<3x1x2x2x16xi32>, vector<16xi32>
        }
